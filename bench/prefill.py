"""Time to first token with captured graph segments against eager, for 1 prompt or 16."""

from __future__ import annotations

import random
import time

import offline
import pool
import torch
from record import record, table
from shapes import SHAPES

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams

TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
REQUESTS = (1, 16)
ROUNDS = 9
ROOM = 4 << 30  # bytes that eager steps allocate


def run() -> None:
    """KVLINE_BENCH_MODELS, comma-separated, selects models."""
    rows = []
    for name in offline.models():
        engine, _ = offline.start(name)
        offline.shrink(engine, ROOM)
        for requests in REQUESTS:
            for tokens in TOKENS:
                rows.append(
                    [name, str(requests), str(tokens), *compare(engine, name, requests, tokens)]
                )
                print(rows[-1], flush=True)
        engine.executor.resize((0,) * len(engine.executor.pages))
        del engine
        torch.cuda.empty_cache()
    head = ["model", "requests", "tokens in all", "captured ms", "eager ms", "ratio"]
    table("All first tokens of a prompt step, median", head, rows)


def compare(engine: Engine, name: str, requests: int, tokens: int) -> list[str]:
    """Captured and eager alternate. The longest prompt leaves room for one output token."""
    runner = offline.worker(engine)
    assert runner.graphs is not None
    ways = {"captured": runner.graphs, "eager": None}
    times: dict[str, list[float]] = {way: [] for way in ways}
    length = min(tokens, offline.MAX_MODEL_LEN - 1) // requests
    for turn in [*ways] * (ROUNDS + 1):
        runner.graphs = ways[turn]
        times[turn].append(first_tokens(engine, name, requests, length))
    runner.graphs = ways["captured"]
    medians = []
    for way, found in times.items():
        kept = sorted(found[1:])  # the first run of each warms up
        medians.append(kept[ROUNDS // 2])
        spread = (kept[0], kept[-1])
        label = f"prefill-{way}-{tokens}x{requests}-{name}"
        record(label, medians[-1], "ms", spread, torch.cuda.get_device_name(0))
    return [*(f"{ms:.2f}" for ms in medians), f"{medians[0] / medians[1]:.2f}"]


def first_tokens(engine: Engine, name: str, requests: int, length: int) -> float:
    """Milliseconds from the first submit to the last first token, without prefix cache."""
    pool.renew(engine)
    rng = random.Random(length)
    most = SHAPES[name].vocabulary - 10
    prompts = [[rng.randrange(10, most) for _ in range(length)] for _ in range(requests)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for id, prompt in enumerate(prompts):
        engine.submit(id, prompt, SamplingParams(1, 0.0, ignore_eos=True))
    while not engine.idle:
        engine.step()
    return 1e3 * (time.perf_counter() - began)
