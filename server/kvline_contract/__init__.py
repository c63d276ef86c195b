"""What the operator and the server say to each other. Standard library only."""
