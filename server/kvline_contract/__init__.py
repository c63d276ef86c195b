"""The documents exchanged between operator and server. Standard library only."""
