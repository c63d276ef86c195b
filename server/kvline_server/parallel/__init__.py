"""Runs one engine's steps on its devices; the engine and sizing know nothing else of them."""
