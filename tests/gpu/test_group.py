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
WIDTH = 4096


@pytest.mark.parametrize("kind", ["symmetric", "nccl"])
def test_ranks_add_and_exchange(kind: str, tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    spawn(  # type: ignore[no-untyped-call]
        rank_of, (kind, ranks, tmp_path), nprocs=ranks
    )


def rank_of(rank: int, kind: str, ranks: int, folder: Path) -> None:
    """In a process of its own."""
    torch.cuda.set_device(rank)
    group = made(kind, rank, ranks, folder)
    torch.manual_seed(rank)
    for rows in (*ROWS, 64, 3000):  # an even number of few rows: sums come in pairs
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        everyone = group.gather(x[:300])
        got = group.sum(placed(group, x))[:300]
        close(got, everyone.float().sum(0), 5e-3)
        same_on_all(group, got.contiguous())
    adds(group)
    exchanges(group)
    graph_of_adds(group)
    apart(group)
    group.gather(torch.zeros(1, device="cuda"))  # all have ended
    torch.cuda.synchronize()


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
    """Many in a row, each with other numbers: nobody reads what another still writes."""
    for rows in ROWS:
        torch.manual_seed(5)
        residual = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        want = residual.float()
        torch.manual_seed(100 + group.rank)
        for _ in range(50):
            x = torch.randn(rows, WIDTH, device="cuda").bfloat16() / 8
            want += group.gather(x).float().sum(0)
            group.add(placed(group, x), residual)
        close(residual, want, 2e-2)
        same_on_all(group, residual)


def exchanges(group: Any) -> None:
    count = group.ranks * 35
    for turn in range(20):
        numbers = torch.arange(count, device="cuda").view(group.ranks, 7, 5).float()
        got = group.exchange(numbers + 1000 * group.rank + turn)
        for peer in range(group.ranks):
            assert torch.equal(got[peer], numbers[group.rank] + 1000 * peer + turn)


def graph_of_adds(group: Any) -> None:
    residual = torch.zeros((4, WIDTH), device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(6):
            made = group.buffer(4, WIDTH)
            made = torch.empty_like(residual) if made is None else made
            group.add(made.fill_(group.rank + 1), residual)

    with group.apart():
        work()  # what a capture needs to have run before it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    residual.zero_()
    for _ in range(5):
        graph.replay()
    each = 6 * sum(range(1, group.ranks + 1))
    assert (residual == 5 * each).all(), (residual, each)


def apart(group: Any) -> None:
    """Each rank alone, in another order of calls than the others: nobody waits."""
    if group.rank:
        with group.apart():
            x = placed(group, torch.ones((4, WIDTH), device="cuda", dtype=torch.bfloat16))
            assert (group.sum(x) == 1).all()
            assert torch.equal(group.gather(x), x.expand(group.ranks, *x.shape))
        torch.cuda.synchronize()


def same_on_all(group: Any, x: torch.Tensor) -> None:
    first, *others = group.gather(x)
    assert all(torch.equal(first, other) for other in others)


def close(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    distance = float((got.float() - want).norm() / want.norm())
    assert distance < most, distance
