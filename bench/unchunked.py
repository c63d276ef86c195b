"""Prompt logprobs in kvline's chunks against one chunk per step: r512, chosen token only. The KV
cache is shrunk so that the logits of a whole step fit."""

from __future__ import annotations

import offline
import torch
from record import record, table
from workloads import WORKLOADS

from kvline_server.memory.pages import PAGE_SIZE

ROUNDS = 3
ROOM = 6 << 30  # bytes freed for a step's logits and their scoring


def run() -> None:
    rows = []
    gpu = torch.cuda.get_device_name(0)
    for name in offline.models("llama8b"):
        engine, _ = offline.start(name)
        runner, workload = offline.worker(engine), WORKLOADS["r512lp-top0"]
        offline.shrink(engine, ROOM)
        sizes = {"chunked": runner.logprob_rows, "whole": engine.scheduler.max_step_tokens}
        rates: dict[str, list[float]] = {kind: [] for kind in sizes}
        for kind in [*sizes] * ROUNDS:
            runner.logprob_rows = sizes[kind]
            rates[kind].append(offline.rate(engine, name, workload))
            print(name, kind, f"{rates[kind][-1]:.0f}", flush=True)
        pairs = [a / b for a, b in zip(rates["chunked"], rates["whole"], strict=True)]
        ratio = sorted(pairs)[ROUNDS // 2]
        record(f"chunked-ratio-{name}", ratio, "ratio", (min(pairs), max(pairs)), gpu)
        for kind, found in rates.items():
            cells = [str(sizes[kind]), f"{max(found):.0f}", f"{min(found):.0f}"]
            rows.append([name, kind, *cells, f"{ratio:.3f}" if kind == "chunked" else ""])
        engine.executor.resize((0,) * len(engine.executor.pages))
        del engine, runner
        torch.cuda.empty_cache()
    head = ["model", "logprobs", "rows a chunk", "tokens/s", "worst", "median of pairs"]
    table(f"r512 with input logprobs, pages of {PAGE_SIZE}", head, rows)
