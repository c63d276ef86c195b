"""Captured CUDA graphs of steps: whole ones, and the segments between attention calls."""
