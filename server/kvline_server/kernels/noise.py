"""A draw as a race: each token's weight over exponential noise of its own, and the largest wins.

That picks each token with its share of the weights (Gumbel-max in other words: Maddison, Tarlow,
Minka 2014), and a small change of the weights moves the outcome only where the two best are as
close as the change, where a walk along cumulated weights would move with every token before it.
The noise is a hash of (key, token id), so there is no generator's state and no order.
"""

from __future__ import annotations

import numpy as np
import torch

# Mixing constants: "lowbias32" of Wellons' hash prospector; the kernel `draw` has the same ones.
SPREAD, FIRST, SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
LARGEST = 1.0 - 2.0**-24  # the largest float32 under 1
CUDA_ROWS = 32  # a CPU takes one row at a time, which then stays in its cache


def race(weights: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """The winner of each row. weights float32 [rows, vocabulary], none below 0, changed in place;
    keys uint64 [rows] -> int64 [rows]"""
    rows, vocabulary = weights.shape
    device = weights.device
    block = CUDA_ROWS if weights.is_cuda else 1
    words = torch.from_numpy(keys.view(np.int32).reshape(rows, 2)).to(device)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=device).mul_(_signed(SPREAD))
    winners = torch.empty(rows, dtype=torch.int64, device=device)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        low, high = words[part, :1], words[part, 1:]
        hashed = _mix(_mix(tokens + low).bitwise_xor_(high))
        torch.argmax(weights[part].div_(_exponential(hashed)), dim=-1, out=winners[part])
    return winners


def _exponential(hashed: torch.Tensor) -> torch.Tensor:
    """31 bits of each hash as an exponential number, never 0 and never infinite."""
    uniform = _shifted(hashed, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return uniform.neg_().log1p_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """In place; int32 stands for uint32, whose products wrap alike."""
    x ^= _shifted(x, 16)
    x *= FIRST
    x ^= _shifted(x, 15)
    x *= _signed(SECOND)
    x ^= _shifted(x, 16)
    return x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
