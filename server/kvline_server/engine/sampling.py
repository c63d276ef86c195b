"""The next token of each sampled row: penalties and bias first, then the draw in the kernels.

The draw of a sequence's n-th token depends on its seed and n alone, so neither batch mates nor
preemption change what a seeded request says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvline_server.engine import penalties
from kvline_server.engine.request import Sequence
from kvline_server.kernels.interface import Draws, Kernels

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFFFFFFFFFF


def uniform(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from (seed, counter): splitmix64 (Steele, Lea, Flood 2014), twice."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds) + counters)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(kernels: Kernels, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Token ids, one per row. May change `logits` in place. [rows, vocabulary] -> int64 [rows]"""
    penalties.apply(kernels, logits, sequences)
    return kernels.choose(logits, draws(sequences))


def draws(sequences: list[Sequence]) -> Draws:
    params = [s.params for s in sequences]
    return Draws(
        temperatures=np.asarray([p.temperature for p in params], dtype=np.float32),
        top_k=np.asarray([p.top_k for p in params], dtype=np.int32),
        top_p=np.asarray([p.top_p for p in params], dtype=np.float32),
        min_p=np.asarray([p.min_p for p in params], dtype=np.float32),
        uniforms=uniform(
            np.asarray([p.seed & _MASK for p in params], dtype=np.uint64),
            np.asarray([s.output_length for s in sequences], dtype=np.uint64),
        ),
    )
