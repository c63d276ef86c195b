"""Histograms of durations, counted by the HTTP processes and shown by the parent.

Each process sends what it has counted since it began, and none is started twice under one parent,
so sums over the processes never decrease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

# Upper bounds in seconds, with at most a factor of 2 between two: percentiles are interpolated.
BOUNDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)


class Histogram(msgspec.Struct, array_like=True):
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0  # in all

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` durations of so many seconds each."""
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.seconds += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and cumulative counts, as Prometheus has them."""
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(self.counts), strict=True))


class Latencies(msgspec.Struct, array_like=True):
    """Of sequences; those of a request's choices count one by one."""

    first_token: Histogram = msgspec.field(default_factory=Histogram)
    between_tokens: Histogram = msgspec.field(default_factory=Histogram)
    queue: Histogram = msgspec.field(default_factory=Histogram)
    whole: Histogram = msgspec.field(default_factory=Histogram)


def total(parts: Iterable[Latencies]) -> Latencies:
    out = Latencies()
    for part in parts:
        for name in Latencies.__struct_fields__:
            mine, other = getattr(out, name), getattr(part, name)
            mine.counts = [a + b for a, b in zip(mine.counts, other.counts, strict=True)]
            mine.seconds += other.seconds
    return out


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds, interpolated within a bucket as by Prometheus' histogram_quantile; None of nothing.
    Of what is longer than the last bound only that bound is known."""
    rank = share * sum(counts)
    below, low = 0, 0.0
    for bound, count in zip(BOUNDS, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * max(0.0, rank - below) / count
        below, low = below + count, bound
    return low if sum(counts) else None
