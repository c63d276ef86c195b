"""Sizes the KV cache: the profile loop, memory by part, records of earlier results."""
