"""Time of a decode step: wall time, host time, and the host's wait for the device."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import time

import offline
import pool
import torch
from record import record, table

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.worker.worker import LaunchedStep

STEPS = 60
BATCHES = [int(n) for n in os.environ.get("KVLINE_BENCH_BATCHES", "64,256,512,1024").split(",")]


def run() -> None:
    """KVLINE_BENCH_MODELS and KVLINE_BENCH_BATCHES, comma-separated, select models and numbers of
    requests; KVLINE_BENCH_PROFILE=1,256 prints profiles of that many, by function and by kernel."""
    rows = []
    for name in offline.models():
        engine, _ = offline.start(name, running=max(BATCHES))
        for kind, penalty in (("plain", 1.0), ("penalised", 1.1)):
            for batch in BATCHES:
                rows.append([name, kind, str(batch), *measure(engine, name, batch, penalty)])
                print(rows[-1], flush=True)
        for wanted in filter(None, os.environ.get("KVLINE_BENCH_PROFILE", "").split(",")):
            profile(engine, int(wanted))
        engine.executor.resize((0,) * len(engine.executor.pages))
        del engine
        torch.cuda.empty_cache()
    head = ["model", "requests", "batch", "step ms", "host ms", "waiting ms"]
    table("A decode step, contexts of about 600 tokens", head, rows)


def fill(engine: Engine, batch: int, penalty: float = 1.0) -> None:
    """`batch` sequences, all decoding."""
    pool.renew(engine)
    for id in range(batch):
        tokens = [(id * 7 + i) % 1000 + 10 for i in range(512)]
        params = SamplingParams(
            4 * STEPS, 0.6, repetition_penalty=penalty, seed=id, ignore_eos=True
        )
        engine.submit(id, tokens, params)
    while len(engine.scheduler.running) < batch or any(
        s.uncomputed > 1 for s in engine.scheduler.running
    ):
        engine.step()
    for _ in range(5):
        engine.step()


def measure(engine: Engine, name: str, batch: int, penalty: float) -> list[str]:
    fill(engine, batch, penalty)
    waited = 0.0
    wait = LaunchedStep.wait

    def timed(step: LaunchedStep):  # type: ignore[no-untyped-def]
        nonlocal waited
        began = time.perf_counter()
        out = wait(step)
        waited += time.perf_counter() - began
        return out

    LaunchedStep.wait = timed  # type: ignore[method-assign, assignment]
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    wall = time.perf_counter() - began
    LaunchedStep.wait = wait  # type: ignore[method-assign]
    empty(engine)
    host, kind = 1e6 * (wall - waited) / STEPS, "penalised-" if penalty != 1.0 else ""
    gpu = torch.cuda.get_device_name(0)
    record(f"host-us-{kind}{batch}-{name}", host, "us", (host, host), gpu)
    return [f"{1e3 * t / STEPS:.2f}" for t in (wall, wall - waited, waited)]


def empty(engine: Engine) -> None:
    for id in list(engine.sequences):
        engine.abort(id)
    while not engine.idle:
        engine.step()


def profile(engine: Engine, batch: int) -> None:
    print(f"{batch} requests: 30 steps by function, 8 by kernel", flush=True)
    fill(engine, batch)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(30):
        engine.step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(32)
    print(text.getvalue()[:6000], flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as device:
        for _ in range(8):
            engine.step()
        torch.cuda.synchronize()
    print(device.key_averages().table(sort_by="cuda_time_total", row_limit=16)[:6000], flush=True)
    empty(engine)
