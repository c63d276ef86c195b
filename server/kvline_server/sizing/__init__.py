"""Sizes the KV cache: the profile loop, its stress set, records of earlier results."""
