"""Collectives of ranks: the time of an all-reduce of hidden states and the norm after it, the GPU
memory that a group takes, the peak of scored logits by slices of the vocabulary and gathered."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import peers
import torch
from flashinfer import norm
from record import record, table
from torch.multiprocessing.spawn import spawn

from kvline_server.kernels.flashinfer import FlashInferKernels
from kvline_server.kernels.gpu_gemms import FEW_ROWS
from kvline_server.model.shard import Shard, share, tokens
from kvline_server.parallel.nccl import NcclGroup
from kvline_server.parallel.several import SeveralGpus
from kvline_server.parallel.symmetric import SymmetricGroup
from kvline_server.worker.vocabulary import Vocabulary

# Llama-3.1-8B's: hidden states, rows of the largest step, vocabulary, and rows of a scored chunk.
WIDTH, LARGEST, VOCABULARY, CHUNK, TOP = 4096, 8192, 128_256, 640, 20
ROWS = (1, 8, 32, 128, 256, 512, 2048, 8192)
ONE_SHOT, TWO_SHOT, NCCL = WAYS = "one-shot", "two-shot", "NCCL"
TIMES, REPLAYS, ROUNDS = 20, 10, 7  # in a graph, of a graph in a round
MIB = 1 << 20

Found = dict[str, Any]


def run() -> None:
    """On KVLINE_BENCH_GPUS (all)."""
    ranks = peers.GPUS if peers.GPUS > 1 else torch.cuda.device_count()
    symmetric, nccl = (measured(kind, ranks) for kind in (SymmetricGroup, NcclGroup))
    ways = {**symmetric["times"], **nccl["times"]}
    rows = []
    for count in ROWS:
        times = {way: found[str(count)] for way, found in ways.items() if str(count) in found}
        for way, (best, least, most) in times.items():
            keep(f"all-reduce-us-{way.lower()}-{count}-tp{ranks}", best, "us", (least, most))
        shown = [f"{times[way][0]:.1f}" if way in times else "" for way in WAYS]
        rows.append([f"{count} x {WIDTH}", *shown])
    head = ["rows of hidden states, bf16", *WAYS]
    title = f"Microseconds of an all-reduce over {ranks} GPUs, with residual and norm"
    table(title, head, rows)
    rows = []
    for way, found in (("symmetric memory", symmetric), (NCCL, nccl)):
        keep(f"group-mib-{way.split()[0].lower()}-tp{ranks}", found["taken"], "MiB")
        rows.append([way, f"{found['taken']:.0f}"])
    table(f"MiB of a GPU for steps of {LARGEST} rows", ["", "taken"], rows)
    rows = []
    for way, found in (("slices", symmetric), ("gathered", nccl)):
        keep(f"logits-mib-{way}-tp{ranks}", found["logits"], "MiB")
        rows.append([way, f"{found['logits']:.0f}"])
    title = f"Peak of {CHUNK} rows of {VOCABULARY} logits and their top-{TOP} scores, MiB a rank"
    table(title, ["", "peak"], rows)


def keep(name: str, value: float, unit: str, spread: tuple[float, float] | None = None) -> None:
    record(name, value, unit, spread or (value, value), torch.cuda.get_device_name(0))


def measured(kind: type[SeveralGpus], ranks: int) -> Found:
    """By a process a GPU. -> rank 0's figures"""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_of_rank, (kind, ranks, Path(folder)), nprocs=ranks)  # type: ignore[no-untyped-call]
        return dict(json.loads((Path(folder) / "found.json").read_text()))


def _of_rank(rank: int, kind: Any, ranks: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")  # the context
    free = torch.cuda.mem_get_info()[0]
    group = kind(rank, ranks, folder, LARGEST * WIDTH, torch.bfloat16)
    found: Found = {"taken": (free - torch.cuda.mem_get_info()[0]) / MIB}
    if kind is SymmetricGroup:
        found["times"] = {
            ONE_SHOT: {n: microseconds(group, n, added) for n in ROWS if n <= FEW_ROWS},
            TWO_SHOT: {n: microseconds(group, n, fused_norm) for n in ROWS},
        }
        found["logits"] = peak(partial(by_slices, group))
    else:
        found["times"] = {NCCL: {n: microseconds(group, n, fused_norm) for n in ROWS}}
        found["logits"] = peak(partial(gathered, group))
    group.all_gather(torch.zeros(1, device="cuda"))  # all have ended
    torch.cuda.synchronize()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def added(group: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """As the engine does for few rows."""
    group.all_reduce_add(x, residual)
    norm.rmsnorm(residual, weight, eps=1e-5)


def fused_norm(group: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """As the engine does for many."""
    norm.fused_add_rmsnorm(group.all_reduce(x), residual, weight, eps=1e-5)


def microseconds(group: Any, rows: int, work: Callable[..., None]) -> tuple[float, float, float]:
    """Of one within a captured graph of many: the median of rounds, the least and the most."""
    residual, own = torch.zeros((2, rows, WIDTH), device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)

    def many() -> None:
        for _ in range(TIMES):
            x = group.buffer(rows, WIDTH)
            work(group, own if x is None else x, residual, weight)

    with group.apart():
        many()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            many()
    times = []
    for _ in range(ROUNDS):
        group.all_gather(torch.zeros(1, device="cuda"))  # all begin together
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPLAYS / TIMES)
    return median(times), min(times), max(times)


def peak(work: Callable[[], object]) -> float:
    """MiB that it allocates at most, at its second time."""
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def by_slices(group: Any) -> None:
    """As the worker does: no rank has more than its own tokens' logits."""
    own = len(tokens(VOCABULARY, Shard(group.rank, group.ranks)))
    logits = torch.randn(CHUNK, own, device="cuda", dtype=torch.bfloat16)
    Vocabulary(kernels(group), VOCABULARY).score(logits, targets(), TOP)


def gathered(group: Any) -> None:
    """As an engine that gathers logits does: each rank has those of all tokens, and scores them."""
    each = share(VOCABULARY, group.ranks)
    logits = torch.randn(CHUNK, each, device="cuda", dtype=torch.bfloat16)
    parts = group.all_gather(logits)
    whole = parts.transpose(0, 1).reshape(CHUNK, -1)[:, :VOCABULARY]
    del parts
    kernels(group).sampling.score(whole, targets(), TOP)


def kernels(group: Any) -> FlashInferKernels:
    return FlashInferKernels(32 // group.ranks, 8 // group.ranks, 128, group)


def targets() -> torch.Tensor:
    return torch.arange(CHUNK, device="cuda") * 199 % VOCABULARY
