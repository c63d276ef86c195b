"""Inter-token latency of chats while long prompts arrive, by the prompt rows of a mixed step.

Prints the time between tokens of running chats while a prompt arrives each second, and the
throughput of r512.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import demo_engines
import numpy as np
import offline
import pool
import torch
import watch
from record import record, table
from workloads import WORKLOADS

from kvline_contract.launch import Device
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Pictures
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.sizing.settings import DEFAULTS

Ask = Callable[[int], tuple[list[int], Pictures | None]]
PROMPTS = 1_000_000  # request ids of prompts; those of chats begin at 0


@dataclass(frozen=True, slots=True)
class Load:
    chats: int
    context: int  # tokens of each chat when it is measured
    prompt: int  # tokens of each arriving prompt
    every: float  # seconds
    seconds: float
    caps: tuple[int, ...]  # prompt rows per mixed step, measured beside the default


GPU = Load(64, 600, 8000, 1.0, 20.0, (1024, 2048, 4096, 8192))
CPU = Load(4, 100, 1000, 4.0, 24.0, (64, 128, 256, 512))


@dataclass(frozen=True, slots=True)
class Found:
    gaps: np.ndarray  # milliseconds
    tokens: int  # of chats, a second
    first: float  # median seconds from a prompt's arrival to its token
    unanswered: int  # prompts still waiting at the end; more than one: overload


def run() -> None:
    """KVLINE_BENCH_DEVICE=cpu runs a small load on the demo model; KVLINE_BENCH_MODELS selects GPU
    models; KVLINE_BENCH_CAPS, comma-separated, replaces the caps."""
    if os.environ.get("KVLINE_BENCH_DEVICE") == "cpu":
        engine = demo_engines.make(running=16)
        engine.scheduler.mixed_prefill_tokens = DEFAULTS[Device.CPU]["mixed"]
        show("smollm2", engine, CPU, prefill_rate)
        return
    for name in offline.models():
        engine, _ = offline.start(name)
        workload = WORKLOADS["r512"]
        show(name, engine, GPU, partial(offline.rate, name=name, workload=workload))
        engine.executor.resize((0,) * len(engine.executor.pages))
        del engine
        torch.cuda.empty_cache()


def show(name: str, engine: Engine, load: Load, throughput: Callable[[Engine], float]) -> None:
    caps = os.environ.get("KVLINE_BENCH_CAPS")
    rows = []
    for cap in (None, *(map(int, caps.split(",")) if caps else load.caps)):
        if cap is not None:
            engine.scheduler.mixed_prefill_tokens, engine.scheduler.prefill_per_request = cap, 0
        label = str(cap or "default")
        found = play(engine, load)
        rate = throughput(engine)
        cuts = [float(np.percentile(found.gaps, q)) for q in (50, 99, 99.9, 100)]
        rows.append([label, *(f"{cut:.1f}" for cut in cuts), str(found.tokens)])
        rows[-1] += [f"{found.first:.2f}", str(found.unanswered), f"{rate:.0f}"]
        print(name, rows[-1], flush=True)
        where = "CPU" if load is CPU else torch.cuda.get_device_name(0)
        record(f"gap-p99-ms-{label}-{name}", cuts[1], "ms", (cuts[0], cuts[3]), where)
        if cap is None:
            record(f"gap-p999-{name}", cuts[2], "ms", (cuts[1], cuts[3]), where)
        record(f"throughput-{label}-{name}", rate, "tokens/s", (rate, rate), where)
    head = ["prompt rows in a mixed step", "gap p50 ms", "p99", "p99.9", "longest", "chat tokens/s"]
    head += ["prompt's first token s", "unanswered", "offline tokens/s"]
    title = f"{name}: {load.chats} chats, a prompt of {load.prompt:,} tokens every {load.every:g} s"
    table(title, head, rows)


def play(engine: Engine, load: Load, ask: Ask | None = None) -> Found:
    """`ask`: makes the prompts that arrive, by their numbers; otherwise they are of text."""
    ask, pace = ask or partial(_text, load.prompt), watch.Pace()
    pool.renew(engine)
    for id in range(load.chats):
        tokens = [(id * 7 + i) % 1000 + 10 for i in range(load.context)]
        engine.submit(id, tokens, SamplingParams(1 << 20, 0.6, seed=id, ignore_eos=True))
    while any(len(s.tokens) < load.context + 8 for s in list(engine.sequences.values())):
        engine.step()
    began = time.perf_counter()
    last = dict.fromkeys(range(load.chats), began)
    arrived: dict[int, float] = {}
    gaps, waits = [], []
    while (now := time.perf_counter()) - began < load.seconds:
        due = PROMPTS + len(arrived)
        if now - began >= len(arrived) * load.every:
            prompt, pictures = ask(due)
            params = SamplingParams(1, 0.6, seed=due, ignore_eos=True)
            engine.submit(due, prompt, params, pictures)
            arrived[due] = now
        outputs = engine.step()
        now = time.perf_counter()
        for id in (output.sequence.id for output in outputs):
            if id in last:
                gaps.append(1e3 * (now - last[id]))
                last[id] = now
            else:
                waits.append(now - arrived[id])
        pace.print(f"{len(gaps)} tokens, {len(waits)} of {len(arrived)} prompts")
    for id in [*last, *arrived]:
        engine.abort(id)
    while not engine.idle:
        engine.step()
    left = len(arrived) - len(waits)
    return Found(
        np.asarray(gaps), round(len(gaps) / load.seconds), float(np.median(waits or [0.0])), left
    )


def _text(tokens: int, number: int) -> tuple[list[int], None]:
    return [(number * 31 + i * 17) % 1000 + 10 for i in range(tokens)], None


def prefill_rate(engine: Engine) -> float:
    """Tokens a second of 24 short requests, with prompts beside decodes most of the time."""
    pool.renew(engine)
    began, tokens = time.perf_counter(), 0
    for id in range(24):
        prompt = [(id * 13 + i * 29) % 1000 + 10 for i in range(20 + 12 * id)]
        engine.submit(id, prompt, demo_engines.greedy(8 + id % 9))
        tokens += len(prompt) + 8 + id % 9
    demo_engines.drain(engine)
    return tokens / (time.perf_counter() - began)
