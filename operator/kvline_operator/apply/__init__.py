"""Writes: child objects where they differ, and notices to pods."""
