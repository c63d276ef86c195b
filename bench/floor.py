"""A workload's kernels alone: the time in which at least one of them runs, of the time it takes.

The engine runs the workload once for the clock and once under the profiler, which records when each
kernel began and ended; the union of those is what an engine without any gap would need with the
same kernels. Its share of the clock's time is how much the host costs.
"""

from __future__ import annotations

import os
from typing import Any

import offline
import torch
from record import record, table
from shapes import SHAPES

TOP = 8  # kernels named


def run() -> None:
    """KVLINE_BENCH_MODELS and KVLINE_BENCH_WORKLOADS (r512, nano), comma-separated, narrow it."""
    rows, kernels = [], []
    gpu = torch.cuda.get_device_name(0)
    for name in os.environ.get("KVLINE_BENCH_MODELS", ",".join(SHAPES)).split(","):
        engine, _ = offline.start(name)
        for kind in os.environ.get("KVLINE_BENCH_WORKLOADS", "r512,nano").split(","):
            workload = offline.WORKLOADS[kind]
            requests = workload.make(SHAPES[name].vocabulary)
            offline.play(engine, workload, requests[:8])
            took = min(offline.play(engine, workload, requests) for _ in range(2))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                offline.play(engine, workload, requests)
                torch.cuda.synchronize()
            busy, shares = spans(seen.profiler.kineto_results.events())
            record(f"floor-{kind}-{name}", busy / took, "ratio", (busy / took,) * 2, gpu)
            counted = sum(o + (len(p) if workload.counts_input else 0) for p, o in requests)
            figures = [f"{took:.2f}", f"{busy:.2f}", f"{busy / took:.3f}", f"{counted / busy:.0f}"]
            rows.append([name, kind, *figures])
            print(rows[-1], flush=True)
            kernels += [[name, kind, *share] for share in shares]
        engine.runner.arena.resize(0)
        del engine
        torch.cuda.empty_cache()
    head = ["model", "workload", "seconds", "kernels", "ratio", "tokens/s without gaps"]
    table("Kernels alone against the clock", head, rows)
    table("Where the kernels' time goes", ["model", "workload", "kernel", "seconds", "%"], kernels)


def spans(events: list[Any]) -> tuple[float, list[list[str]]]:
    """Seconds in which a kernel ran, and the largest kernels' own."""
    intervals, each = [], dict[str, int]()
    for event in events:
        if str(event.device_type()).endswith("CUDA"):
            intervals.append((event.start_ns(), event.end_ns()))
            each[event.name()] = each.get(event.name(), 0) + event.end_ns() - event.start_ns()
    busy = end = 0
    for first, last in sorted(intervals):
        busy += max(0, last - max(first, end))
        end = max(end, last)
    total = sum(each.values())
    top = sorted(each.items(), key=lambda item: -item[1])[:TOP]
    return busy / 1e9, [[n[:60], f"{t / 1e9:.2f}", f"{100 * t / total:.0f}"] for n, t in top]
