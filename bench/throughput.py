"""Output tokens per second against transformers' generate, float32, two threads."""

from __future__ import annotations

import random
import time
from typing import Any

import demo_engines
import pool
import torch
from record import record, table

from kvline_server.engine.engine import Engine

ROUNDS = 3
Request = tuple[list[int], int]  # prompt, output length


def equal() -> list[Request]:
    """Batch 8 of equal lengths."""
    rng = random.Random(0)
    return [([rng.randrange(10, 49_000) for _ in range(128)], 64) for _ in range(8)]


def mixed() -> list[Request]:
    """32 requests, seed 0, prompts 32-256, outputs 16-256."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 49_000) for _ in range(rng.randint(32, 256))] for _ in range(32)]
    return [(p, rng.randint(16, 256)) for p in prompts]


def ours(engine: Engine, requests: list[Request]) -> float:
    pool.renew(engine)
    started = time.perf_counter()
    for id, (prompt, output) in enumerate(requests):
        engine.submit(id, list(prompt), demo_engines.greedy(output))
    demo_engines.drain(engine)
    return time.perf_counter() - started


def theirs(model: Any, requests: list[Request]) -> float:
    """Sorted by total length, left-padded, in batches of eight: the best case without batching
    continuously."""
    ordered = sorted(requests, key=lambda r: (r[1], len(r[0])))
    started = time.perf_counter()
    for at in range(0, len(ordered), 8):
        batch = ordered[at : at + 8]
        width = max(len(p) for p, _ in batch)
        ids = torch.tensor([[2] * (width - len(p)) + p for p, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(n for _, n in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
    return time.perf_counter() - started


def run() -> None:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    engine = demo_engines.make()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        demo_engines.folder(), dtype=torch.float32
    )
    rows = []
    for name, requests, bar in (("batch8-equal", equal(), 1.0), ("mixed-32", mixed(), 1.5)):
        tokens = sum(n for _, n in requests)
        ours(engine, requests[:2])
        times: list[tuple[float, float]] = []
        for number in range(ROUNDS):
            times.append((ours(engine, requests), theirs(model, requests)))
            print(f"  {name} run {number + 1}: {times[-1][0]:.1f} s, {times[-1][1]:.1f} s")
        mine, other = min(t[0] for t in times), min(t[1] for t in times)
        ratio = other / mine
        ratios = [b / a for a, b in times]
        record(f"throughput-{name}-ratio", ratio, "ratio", (min(ratios), max(ratios)))
        record(f"throughput-{name}", tokens / mine, "output tok/s", (0, 0))
        rows.append(
            [name, f"{tokens / mine:.0f}", f"{tokens / other:.0f}", f"{ratio:.2f}", f"{bar}"]
        )
    head = ["workload", "kvline tok/s", "transformers tok/s", "ratio", "bar"]
    table("Throughput, SmolLM2-135M, float32, 2 threads, best of three", head, rows)
