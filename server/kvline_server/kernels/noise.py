"""Gumbel-max sampling in its exponential form: the largest probability / noise wins.

Each token has exponential noise of its own, so that it wins with its probability (Maddison,
Tarlow, Minka 2014). A small change of the probabilities changes the result only where the two best
tokens are that close; inverse-CDF sampling would shift with every token before the one sampled.
The noise is a hash of (key, token id): no generator state, no dependence on order or batch.
"""

from __future__ import annotations

import numpy as np
import torch

# Mixing constants: "lowbias32" of Wellons' hash prospector; the Triton kernel `draw` uses the same.
SPREAD, FIRST, SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
LARGEST = 1.0 - 2.0**-24  # the largest float32 under 1
CUDA_ROWS = 32  # rows at a time on a GPU
CPU_NUMBERS = 1 << 16  # numbers at a time on a CPU, which stay in its cache; at least a row


def gumbel_max(weights: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """Samples one token per row. weights float32 [rows, vocabulary], not negative, overwritten;
    keys uint64 [rows] -> int64 [rows]"""
    rows, vocabulary = weights.shape
    device = weights.device
    block = CUDA_ROWS if weights.is_cuda else max(1, CPU_NUMBERS // vocabulary)
    words = torch.from_numpy(keys.view(np.int32).reshape(rows, 2)).to(device)
    tokens = _spread(0, vocabulary, device)
    winners = torch.empty(rows, dtype=torch.int64, device=device)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        noise = _exponential(_hashed(tokens, words[part]))
        torch.argmax(weights[part].div_(noise), dim=-1, out=winners[part])
    return winners


def exponential(keys: np.ndarray, first: int, like: torch.Tensor) -> torch.Tensor:
    """The noise of the tokens from `first` on, float32, of the shape of `like` [rows, tokens]."""
    words = torch.from_numpy(keys.view(np.int32).reshape(len(keys), 2)).to(like.device)
    return _exponential(_hashed(_spread(first, like.shape[1], like.device), words))


def _spread(first: int, count: int, device: torch.device) -> torch.Tensor:
    tokens = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return tokens.mul_(_signed(SPREAD))


def _hashed(tokens: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """tokens [tokens], words int32 [rows, 2] -> [rows, tokens]"""
    return _mix(_mix(tokens + words[:, :1]).bitwise_xor_(words[:, 1:]))


def _exponential(hashed: torch.Tensor) -> torch.Tensor:
    """An exponential random number from 31 bits of each hash; never 0, never infinite."""
    uniform = _shifted(hashed, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return uniform.neg_().log1p_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """In place. int32 stands for uint32: multiplication wraps the same way."""
    x ^= _shifted(x, 16)
    x *= FIRST
    x ^= _shifted(x, 15)
    x *= _signed(SECOND)
    x ^= _shifted(x, 16)
    return x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
