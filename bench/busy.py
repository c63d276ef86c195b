"""GPU-busy time of a workload: the time in which at least one kernel runs.

From the profiler's start and end times of each kernel. It is the time of an engine with the same
kernels and no gaps between them; its share of the wall time shows what gaps cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TOP = 8  # kernels named


def busy(work: Callable[[], Any]) -> tuple[float, list[list[str]]]:
    """GPU-busy seconds, and the kernels that took most: name, seconds, percent."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    intervals, each = [], dict[str, int]()
    for event in seen.profiler.kineto_results.events():
        if str(event.device_type()).endswith("CUDA"):
            intervals.append((event.start_ns(), event.end_ns()))
            each[event.name()] = each.get(event.name(), 0) + event.end_ns() - event.start_ns()
    took = end = 0
    for first, last in sorted(intervals):
        took += max(0, last - max(first, end))
        end = max(end, last)
    total = sum(each.values())
    top = sorted(each.items(), key=lambda item: -item[1])[:TOP]
    return took / 1e9, [[n[:60], f"{t / 1e9:.4f}", f"{100 * t / total:.0f}"] for n, t in top]
