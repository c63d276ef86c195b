"""Grammars: what an answer must follow, and the tokens that may come next."""
