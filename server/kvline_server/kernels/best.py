"""Each row's best token as one number that ranks compare: the largest is the best of all.

The score's bits, in the order of numbers, stand above the complement of the token: of equal scores
the lowest token wins. A row that is not finite has an infinite score and NO_TOKEN, which beat all;
one without any token has the lowest score, and NO_TOKEN. The Triton kernel `draw` makes the same.
"""

from __future__ import annotations

import torch

from kvline_server.kernels.layout import NO_TOKEN

LARGEST = 0x7FFFFFFF  # token, and magnitude of a float's bits
LOW = 0xFFFFFFFF


def ordered(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32, int64 [rows] -> int64 [rows]"""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ LARGEST, bits).to(torch.int64)
    return (order << 32) | (LARGEST - torch.where(scores.isfinite(), tokens, NO_TOKEN))


def token_of(best: torch.Tensor) -> torch.Tensor:
    """The token of each number. int64 [rows]"""
    return LARGEST - (best & LOW)
