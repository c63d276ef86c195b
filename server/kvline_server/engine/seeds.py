"""From a request's seed to its choices' seeds and to each draw's key: splitmix64 (Steele, Lea,
Flood 2014), twice, so that neither neighbouring seeds nor counters share anything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MAX_SEED = 2**63 - 1


def keys(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A key from each (seed, counter)."""
    with np.errstate(over="ignore"):
        return _splitmix(_splitmix(seeds) + counters)


def of_choice(seed: int, choice: int) -> int:
    """The first choice has the request's own seed, as a request of one choice has."""
    if not choice:
        return seed
    return int(keys(np.asarray([seed], np.uint64), np.asarray([choice], np.uint64))[0]) & MAX_SEED


def _splitmix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
