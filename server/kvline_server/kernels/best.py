"""Each row's best token as one number that ranks compare: the largest is the best of all.

The score's bits in the order of numbers, above the token's complement: of equal scores the lowest
token wins. A row that is not finite has an infinite score, one without any token a negative one.
The Triton kernel `draw` makes the same numbers.
"""

from __future__ import annotations

import torch

from kvline_server.kernels.interface import NO_TOKEN

MAGNITUDE = 0x7FFFFFFF
TOKENS = 0xFFFFFFFF
INFINITE = 0x7F800000  # the bits of an infinite float32


def ordered(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32, int64 [rows] -> int64 [rows]"""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    key = torch.where(bits < 0, bits ^ MAGNITUDE, bits).to(torch.int64)
    return (key << 32) | (TOKENS - tokens)


def token_of(best: torch.Tensor) -> torch.Tensor:
    """The token of each number, NO_TOKEN of one whose score is not finite. int64 [rows]"""
    key = best >> 32
    finite = (key < INFINITE) & (key > (INFINITE ^ MAGNITUDE) - (1 << 31))
    return torch.where(finite, TOKENS - (best & TOKENS), NO_TOKEN)
