"""What is kept in objects between reconciles, and its reading back."""
