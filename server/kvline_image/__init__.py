"""What makes the server images smaller than their packages. Standard library only."""
