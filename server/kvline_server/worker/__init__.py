"""Runs steps on one device: the model, captured graphs, LM head and sampling."""
