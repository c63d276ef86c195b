"""Chunked against unchunked prompt logprobs: time and peak memory."""

from __future__ import annotations

import os
import random
import time

import demo_engines
import offline
import pool
from record import record, table

from kvline_server.engine.engine import Engine
from kvline_server.memory.device import MIB, cpu_device

ROUNDS = 5
PROMPT = 4096
UNCHUNKED = 1 << 20


def score(engine: Engine, prompt: list[int], rows: int) -> float:
    offline.worker(engine).logprob_rows = rows
    pool.renew(engine)
    started = time.perf_counter()
    engine.submit(0, list(prompt), demo_engines.greedy(1, prompt_logprobs=20))
    demo_engines.drain(engine)
    return time.perf_counter() - started


def run() -> None:
    engine = demo_engines.make()
    device = cpu_device(None, os.getpid())
    chunk = offline.worker(engine).logprob_rows
    rng = random.Random(0)
    prompt = [rng.randrange(10, 49_000) for _ in range(PROMPT)]
    times = []
    score(engine, prompt[:512], chunk)
    for number in range(ROUNDS):
        times.append((score(engine, prompt, chunk), score(engine, prompt, UNCHUNKED)))
        print(f"  run {number + 1}: {times[-1][0]:.2f} s, {times[-1][1]:.2f} s", flush=True)
    ratios = [whole / cut for cut, whole in times]
    ratio = min(t[1] for t in times) / min(t[0] for t in times)
    record("chunked-ratio", ratio, "ratio", (min(ratios), max(ratios)))
    # One step for the whole prompt, so that unchunked really means all of its rows at once.
    engine.scheduler.max_step_tokens = PROMPT
    rows = []
    for name, limit in ((f"chunks of {chunk} rows", chunk), ("unchunked", UNCHUNKED)):
        device.settle()
        device.reset_peak()
        before = device.now()
        score(engine, prompt, limit)
        peak = (device.peak() - before) / MIB
        matrix = min(limit, PROMPT) * offline.worker(engine).decoder.config.vocabulary * 4 / MIB
        rows.append([name, f"{peak:.0f}", f"{matrix:.0f}"])
        record(f"logprobs-peak-{'chunked' if limit == chunk else 'unchunked'}", peak, "MiB", (0, 0))
    print(f"\nchunked against unchunked, {PROMPT} tokens, top 20: {ratio:.3f} of its speed")
    head = ["4,096-token prompt, prompt_logprobs 20", "peak MiB", "one fp32 matrix MiB"]
    table("Peak memory above the model and its cache", head, rows)
