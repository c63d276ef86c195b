"""Derives the seeds of a request's choices and the key of each sampled token from its seed.

splitmix64 (Steele, Lea, Flood 2014), applied twice, so that adjacent seeds or counters give
unrelated keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MAX_SEED = 2**63 - 1


def keys(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One key per (seed, counter). uint64 [n], uint64 [n] -> uint64 [n]"""
    with np.errstate(over="ignore"):
        return _splitmix(_splitmix(seeds) + counters)


def of_choice(seed: int, choice: int) -> int:
    """The seed of a choice; the first choice keeps the request's own."""
    if not choice:
        return seed
    return int(keys(np.asarray([seed], np.uint64), np.asarray([choice], np.uint64))[0]) & MAX_SEED


def _splitmix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
