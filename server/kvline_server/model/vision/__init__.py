"""Towers: encoders of images, whose rows stand in the place of embeddings of tokens."""
