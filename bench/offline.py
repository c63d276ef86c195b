"""The workloads of docs/performance.md on the engine alone, after its own profile loop.

One process, one start, kvline's defaults with maxModelLen 8192. Requests equal those of the vLLM
and SGLang figures: from one random.Random(0), first all prompts, then all output lengths.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import busy
import left
import msgspec
import peers
import pool
import torch
from record import record, table
from shapes import BESIDE, ON_ONE_GPU, SHAPES, TWINS, write_config
from workloads import WORKLOADS, Workload

from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    KVCacheDtype,
    LaunchConfig,
    LoadFormat,
    Model,
    Speculation,
)
from kvline_contract.report import Result
from kvline_server.engine.engine import Engine
from kvline_server.engine_process import start as engine_start
from kvline_server.engine_process.preamble import collect_rarely
from kvline_server.ipc.messages import Progress
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.device import MIB
from kvline_server.options.arguments import GrammarService
from kvline_server.parallel.executor import Local
from kvline_server.sizing.settings import DEFAULTS
from kvline_server.worker.worker import Worker

MAX_MODEL_LEN = 8192
NOTHING_ELSE = EngineOptions()
# Options of a start without a GPU, where a tiny shape shows that a command runs.
ON_CPU: dict[str, Any] = {"device": Device.CPU, "running": 4, "kv_tokens": 6144}
CACHES = [KVCacheDtype(n) for n in os.environ.get("KVLINE_BENCH_KV_CACHE", "auto").split(",")]
PROFILED = os.environ.get("KVLINE_BENCH_PROFILED", "r512,nano").split(",")
# Of a model and its KV cache: runs of each workload, in tokens per second, and its KV tokens.
Cached = tuple[str, KVCacheDtype]  # a model with a KV cache
Every = dict[Cached, dict[str, list[float]]]


class Printed:
    """Prints one line for each update of the report."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        for name, update in msgspec.structs.asdict(progress).items():
            if update is not None:
                print(f"  {time.monotonic() - self.started:6.1f} s  {name}: {update}", flush=True)


def models(default: str = ",".join(ON_ONE_GPU)) -> list[str]:
    return os.environ.get("KVLINE_BENCH_MODELS", default).split(",")


def gpu_name() -> str | None:
    """None: there is no GPU."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def only_cache() -> KVCacheDtype:
    """Of KVLINE_BENCH_KV_CACHE, for benchmarks that compare none."""
    if len(CACHES) > 1:
        raise SystemExit(
            "KVLINE_BENCH_KV_CACHE names several: `python bench offline` compares them"
        )
    return CACHES[0]


def label(name: str, cache: KVCacheDtype) -> str:
    """Of a model with that KV cache in the names of results."""
    return peers.label(name) + ("" if cache is KVCacheDtype.AUTO else f"-{cache}kv")


def start(
    name: str,
    device: Device = Device.CUDA,
    running: int | None = None,
    gpus: int = peers.GPUS,
    cache: KVCacheDtype | None = None,
    kv_tokens: int | None = None,
    max_model_len: int | None = MAX_MODEL_LEN,
    headroom_mib: int | None = None,
    speculation: Speculation | None = None,
    grammars: GrammarService | None = None,
    options: EngineOptions = NOTHING_ELSE,
) -> tuple[Engine, Result]:
    """Loads random weights of a shape, or those of a folder, and sizes itself, as a pod does, for
    at most `running` running requests or kvline's default. Without `max_model_len` the model's own
    context is sought. `options`: what is asked for besides."""
    gc.unfreeze()  # an engine before this one is not to be kept
    gc.collect()
    collect_rarely()
    with tempfile.TemporaryDirectory() as scratch:
        folder, load = Path(name), LoadFormat.WEIGHTS
        if name in SHAPES:
            folder, load = write_config(name, Path(scratch)), LoadFormat.RANDOM
        launch = LaunchConfig(
            version=1,
            namespace="",
            service="",
            revision="",
            image="",
            device=device,
            tensor_parallel=gpus,
            model=Model(str(folder), str(folder), name, load),
            engine=replace(
                options,
                max_model_len=max_model_len,
                max_running_requests=running,
                kv_cache_dtype=cache or only_cache(),
                speculation=speculation,
            ),
            capacity=CapacityOptions(kv_tokens, headroom_mib),
        )
        return engine_start.start(
            launch=launch,
            send=Printed(),
            attempts=Path(scratch) / "attempts.json",
            record=None,
            wait_for_neighbours=lambda: None,
            memory=None,
            root=os.getpid(),
            grammars=grammars,
            **peers.start(launch, Path(scratch)),
        )


def worker(made: Engine) -> Worker:
    """The worker of an engine whose device is in this process."""
    assert isinstance(made.executor, Local)
    return made.executor.worker


def shrink(engine: Engine, nbytes: int) -> None:
    """Frees a part of the KV cache, for measurements that need memory which kvline does not."""
    arena = worker(engine).arena
    first, *others = arena.pages
    arena.resize((first - nbytes // (arena.nbytes // first), *others))
    pool.renew(engine, arena.pages)


def play(
    engine: Engine,
    workload: Workload,
    requests: list[tuple[list[int], int]],
    grammar: bytes = b"",
) -> float:
    """Seconds from the first submit to the last token, nothing of it in the prefix cache; with
    `grammar`, its key, all answers follow one."""
    pool.renew(engine)
    began = time.perf_counter()
    for id, (prompt, output) in enumerate(requests):
        params = SamplingParams(
            max_tokens=output,
            temperature=workload.temperature,
            ignore_eos=True,
            seed=id,
            prompt_logprobs=workload.prompt_logprobs,
            grammar=grammar,
        )
        engine.submit(id, list(prompt), params)  # a copy: the engine appends output tokens
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def run() -> None:
    """KVLINE_BENCH_MODELS and KVLINE_BENCH_WORKLOADS, comma-separated, select; KVLINE_BENCH_ROUNDS
    is the number of runs per workload, KVLINE_BENCH_GPUS that of GPUs, for one start a command, and
    KVLINE_BENCH_KV_CACHE=fp8 quantises the KV cache; with auto,fp8 it is compared with the other.
    The GPU-busy share of KVLINE_BENCH_PROFILED, r512 and nano, is from one more, profiled run."""
    only = os.environ.get("KVLINE_BENCH_WORKLOADS", ",".join(WORKLOADS)).split(",")
    rounds = int(os.environ.get("KVLINE_BENCH_ROUNDS", "2"))
    rows: list[list[str]] = []
    kernels: list[list[str]] = []
    every: Every = {}
    for name, cache in itertools.product(models(), CACHES):
        engine, result = start(name, cache=cache)
        of = label(name, cache)
        print(f"{of}: {result}", left.line(of, result), sep="\n", flush=True)
        rows += sizes(of, result)
        rates = speeds(engine, name, only, rounds)
        rows += kept(of, rates)
        every[name, cache] = {"kv-tokens": [result.kv_tokens], **rates}
        for kind in (k for k in PROFILED if k in rates):
            made, shares = busy_share(engine, name, of, kind, max(rates[kind]))
            rows += made
            kernels += shares
        engine.executor.resize((0,) * len(engine.executor.pages))
        del engine
        gc.collect()  # else the next start may find this one's weights
        torch.cuda.empty_cache()
    rows += compared(every)
    table("Offline, best run", ["model", "workload", "tokens/s", "worst", "of r512"], rows)
    table(
        "GPU time by kernel",
        ["model", "workload", "kernel", "seconds", "%"],
        kernels,
    )


def sizes(of: str, result: Result) -> list[list[str]]:
    gpu, idle = torch.cuda.get_device_name(0), idle_mib()
    record(f"kv-tokens-{of}", result.kv_tokens, "tokens", (result.kv_tokens,) * 2, gpu)
    record(f"idle-mib-{of}", idle, "MiB", (idle, idle), gpu)
    return [[of, "KV tokens", str(result.kv_tokens), "", ""]]


def speeds(engine: Engine, name: str, only: list[str], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each run; the workloads alternate."""
    rates: dict[str, list[float]] = {}
    for kind in only * rounds:
        rates.setdefault(kind, []).append(rate(engine, name, WORKLOADS[kind]))
        print(name, kind, f"{rates[kind][-1]:.0f}", clocks(), flush=True)
    return rates


def kept(of: str, rates: dict[str, list[float]]) -> list[list[str]]:
    """Records the runs; one row per workload, with its throughput relative to r512."""
    gpu, base = torch.cuda.get_device_name(0), max(rates.get("r512", [0.0]))
    rows = []
    for kind, found in rates.items():
        best, spread = max(found), (min(found), max(found))
        record(f"{kind}-{of}", best, "tokens/s", spread, gpu)
        ratio = best / base if kind.startswith("r512lp") and base else None
        if ratio is not None:
            record(f"{kind}-ratio-{of}", ratio, "ratio", (spread[0] / base, ratio), gpu)
        share = "" if ratio is None else f"{ratio:.3f}"
        rows.append([of, kind, f"{best:.0f}", f"{spread[0]:.0f}", share])
    return rows


def compared(every: Every) -> list[list[str]]:
    """KV tokens and throughput over those of the twin: of models in fp8 that in bfloat16, of an fp8
    KV cache the same model without. Throughput also over that of a model of another kind."""
    plain, fp8 = KVCacheDtype
    twins = {
        ((name, cache), (twin, cache)): difference
        for name, (twin, difference) in TWINS.items()
        for cache in CACHES
    }
    twins |= {((name, fp8), (name, plain)): f"{fp8}kv" for name, _ in every}
    rows = []
    for (one, twin), difference in twins.items():
        rows += _over(every, one, twin, f"{{}}-{difference}-ratio-{label(*twin)}")
    rates = {
        each: {kind: values for kind, values in found.items() if kind in WORKLOADS}
        for each, found in every.items()
    }
    for (name, other), cache in itertools.product(BESIDE.items(), CACHES):
        one, twin = (name, cache), (other, cache)
        rows += _over(rates, one, twin, f"{{}}-of-{label(*twin)}-{label(*one)}")
    return rows


def _over(every: Every, one: Cached, twin: Cached, name: str) -> list[list[str]]:
    """Rows of one's figures over the twin's, recorded by `name` with each kind in its place."""
    mine, others, beside = every.get(one, {}), every.get(twin, {}), label(*twin)
    rows = []
    for kind in (kind for kind in mine if kind in others):
        best = max(others[kind])
        worst, ratio = (rate / best for rate in (min(mine[kind]), max(mine[kind])))
        record(name.format(kind), ratio, "ratio", (worst, ratio), torch.cuda.get_device_name(0))
        rows.append([label(*one), f"{kind} / {beside}'s", f"{ratio:.3f}", f"{worst:.3f}", ""])
    return rows


def busy_share(
    engine: Engine, name: str, of: str, kind: str, best: float
) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the throughput of gapless kernels and our share of it, and of time by kernel."""
    alone, shares = kernels_alone(engine, name, WORKLOADS[kind])
    gpu, ratio = torch.cuda.get_device_name(0), best / alone
    busy_of = "gpu-busy-share" if peers.GPUS == 1 else "busy"
    record(f"{busy_of}-{kind}-{of}", ratio, "ratio", (ratio, ratio), gpu)
    rows = [[of, f"{kind}: kernels alone", f"{alone:.0f}", "", ""]]
    rows.append([of, f"{kind}: GPU-busy share", f"{ratio:.3f}", "", ""])
    return rows, [[of, kind, *share] for share in shares]


def rate(engine: Engine, name: str, workload: Workload) -> float:
    requests = asked(name, workload)
    play(engine, workload, requests[:8])
    return workload.counted(requests) / play(engine, workload, requests)


def asked(name: str, workload: Workload) -> list[tuple[list[int], int]]:
    """Its requests; KVLINE_BENCH_REQUESTS: no more than so many of them."""
    most = os.environ.get("KVLINE_BENCH_REQUESTS")
    return workload.make(SHAPES[name].vocabulary)[: int(most) if most else None]


def kernels_alone(engine: Engine, name: str, workload: Workload) -> tuple[float, list[list[str]]]:
    """Tokens per second without gaps between kernels, and the kernels that took most time."""
    requests = asked(name, workload)
    took, shares = busy.busy(lambda: play(engine, workload, requests))
    return workload.counted(requests) / took, shares


def clocks() -> str:
    """The GPU's clock and power right after a run, against their limits: GEMMs are slower on a
    machine with a lower power limit, and no other figure shows that."""
    query = "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "(no nvidia-smi)"


def idle_mib() -> float:
    """The driver's free memory after validation, less the headroom."""
    headroom = DEFAULTS[Device.CUDA]["headroom"]
    return torch.cuda.mem_get_info(0)[0] / MIB - headroom
