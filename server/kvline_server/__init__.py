"""The inference server that sizes itself."""
