"""What ranks on several GPUs exchange, by symmetric memory and NCCL: right, and equal on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here"),
]
ROWS = (1, 7, 32, 300)
MIXED = (128, 1, 20, 7, 300, 33, 32, 1)  # an even number where `buffer` has halves, by turns
WIDTH = 4096


@pytest.mark.parametrize("kind", ["symmetric", "nccl"])
def test_ranks_add_and_exchange(kind: str, tmp_path: Path) -> None:
    """Each rank asserts in its process, whose error `spawn` raises here."""
    ranks = torch.cuda.device_count()
    spawn(  # type: ignore[no-untyped-call]
        rank_of, (kind, ranks, tmp_path), nprocs=ranks
    )
    assert {file.name for file in tmp_path.glob("ended-*")} == {f"ended-{n}" for n in range(ranks)}


def rank_of(rank: int, kind: str, ranks: int, folder: Path) -> None:
    """In a process of its own; leaves a file where all of it was right."""
    torch.cuda.set_device(rank)
    group = made(kind, rank, ranks, folder)
    torch.manual_seed(rank)
    for rows in (*ROWS, 64, 3000):  # an even number of few rows: sums come in pairs
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        everyone = group.all_gather(x[:300])
        got = group.all_reduce(placed(group, x))[:300]
        close(got, everyone.float().sum(0), 5e-3)
        same_on_all(group, got.contiguous())
    adds(group)
    exchanges(group)
    graph_of_adds(group)
    apart(group)
    group.all_gather(torch.zeros(1, device="cuda"))  # all have ended
    torch.cuda.synchronize()
    (folder / f"ended-{rank}").touch()


def made(kind: str, rank: int, ranks: int, folder: Path) -> Any:
    from kvline_server.memory.cuda import reachable
    from kvline_server.parallel.nccl import NcclGroup
    from kvline_server.parallel.symmetric import SymmetricGroup

    if kind == "nccl":
        return NcclGroup(rank, ranks, folder, 3000 * WIDTH, torch.bfloat16)
    assert reachable(ranks)
    return SymmetricGroup(rank, ranks, folder, 3000 * WIDTH, torch.bfloat16)


def placed(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Where a linear would have written it."""
    buffer = group.buffer(*x.shape)
    return x.clone() if buffer is None else buffer.copy_(x)


def adds(group: Any) -> None:
    """Many in a row of every size, each with other numbers, with one rank late now and then: nobody
    reads what another still writes."""
    torch.manual_seed(100 + group.rank)
    parts = [torch.randn(n, WIDTH, device="cuda").bfloat16() / 8 for n in MIXED * 12]
    everyone = [each.float().sum(0) for each in map(group.all_gather, parts)]
    torch.manual_seed(5)
    residuals = [torch.randn(n, WIDTH, device="cuda").bfloat16() for n in MIXED * 12]
    wanted = [r.float() + sum for r, sum in zip(residuals, everyone, strict=True)]
    for turn, (part, residual) in enumerate(zip(parts, residuals, strict=True)):
        late(group, turn)
        group.all_reduce_add(placed(group, part), residual)
    for residual, want in zip(residuals, wanted, strict=True):
        close(residual, want, 5e-3)
        same_on_all(group, residual)


def late(group: Any, turn: int) -> None:
    """Now one rank, now another comes later than the others."""
    if turn % 5 == 0 and turn // 5 % group.ranks == group.rank:
        torch.cuda._sleep(20_000 * (1 + turn % 7))  # type: ignore[no-untyped-call] # clock cycles


def exchanges(group: Any) -> None:
    count = group.ranks * 35
    for turn in range(20):
        numbers = torch.arange(count, device="cuda").view(group.ranks, 7, 5).float()
        got = group.all_to_all(numbers + 1000 * group.rank + turn)
        for peer in range(group.ranks):
            assert torch.equal(got[peer], numbers[group.rank] + 1000 * peer + turn)


def graph_of_adds(group: Any) -> None:
    """Replayed with other numbers each time, which no step before had."""
    count = torch.zeros(1, device="cuda")
    residuals = [
        torch.zeros((n, WIDTH), device="cuda", dtype=torch.bfloat16) for n in MIXED for _ in (0, 1)
    ]

    def work() -> None:
        for number, residual in enumerate(residuals):
            made = group.buffer(*residual.shape)
            made = torch.empty_like(residual) if made is None else made
            group.all_reduce_add(made.copy_(count + number + group.rank), residual.zero_())
        count.add_(1)

    with group.apart():
        work()  # what a capture needs to have run before it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    for replay in range(12):
        count.fill_(replay)
        late(group, 5 * replay)
        graph.replay()
        for number, residual in enumerate(residuals):
            # Whole numbers up to 256 are exact in bfloat16.
            want = sum(replay + number + rank for rank in range(group.ranks))
            assert (residual == want).all(), (replay, number, residual, want)


def apart(group: Any) -> None:
    """Each rank alone, in another order of calls than the others: nobody waits."""
    if group.rank:
        with group.apart():
            x = placed(group, torch.ones((4, WIDTH), device="cuda", dtype=torch.bfloat16))
            assert (group.all_reduce(x) == 1).all()
            assert torch.equal(group.all_gather(x), x.expand(group.ranks, *x.shape))
        torch.cuda.synchronize()


def same_on_all(group: Any, x: torch.Tensor) -> None:
    first, *others = group.all_gather(x)
    assert all(torch.equal(first, other) for other in others)


def close(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    distance = float((got.float() - want).norm() / want.norm())
    assert distance < most, distance
