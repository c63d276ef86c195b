"""How messages name a number of things."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
