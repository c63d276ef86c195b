"""Scores and tokens from ranks' own logits are those of whole rows, on every rank alike. The ranks
are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from near import same_ranking
from ties import same_draws
from torch.overrides import TorchFunctionMode
from waiting import limit

from kvline_server.ipc.seeds import keys
from kvline_server.kernels.layout import NO_TOKEN, SamplingMetadata
from kvline_server.kernels.sampling import RowScores
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_sampling import TorchSampling
from kvline_server.worker import vocabulary
from kvline_server.worker.step import LogitsEdits
from kvline_server.worker.vocabulary import Vocabulary

T = TypeVar("T")
ROUNDING = 2e-6  # of logits of a few units: the same ones, with other sums over them


class Threads:
    """kernels.group.Group of a thread: ranks lay what they give on a common table."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self.sent = rank, len(table), 0
        self.table, self.barrier = table, barrier

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent += x.nbytes
        self.table[self.rank] = x.clone()
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        assert len({(each.shape, each.dtype) for each in found}) == 1
        return found

    def buffer(self, rows: int, width: int) -> None:
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(dim=0))

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self.all_reduce(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[self.rank] for each in self._all(x)])

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield


def on_ranks(ranks: int, size: int, work: Callable[[Vocabulary], T]) -> list[T]:
    table, barrier = [None] * ranks, threading.Barrier(ranks, timeout=limit(30))

    def run(rank: int) -> T:
        try:
            return work(Vocabulary(TorchKernels(group=Threads(rank, table, barrier)), size))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def own(logits: torch.Tensor, part: Vocabulary) -> torch.Tensor:
    return logits[:, part.own.start : part.own.stop].clone()


def metadata_of(rng: np.random.Generator, rows: int, filters: bool = True) -> SamplingMetadata:
    def some(values: list[float], kind: type) -> np.ndarray:
        chosen = values if filters else values[:1]
        return rng.choice(np.array(chosen), rows).astype(kind)

    return SamplingMetadata(
        temperatures=rng.choice(np.array([0.0, 0.6, 1.0, 1.7]), rows).astype(np.float32),
        top_k=some([0, 0, 3, 40, 100_000], np.int32),
        top_p=some([1.0, 1.0, 0.5, 0.95], np.float32),
        min_p=some([0.0, 0.0, 0.05], np.float32),
        keys=keys(rng.integers(0, 2**63, rows).astype(np.uint64), np.arange(rows, dtype=np.uint64)),
    )


def equal(one: RowScores, other: RowScores) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("size", [64, 307, 1024])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("top", [0, 3, 20, 99])
def test_scores_are_those_of_whole_rows(ranks: int, size: int, top: int) -> None:
    torch.manual_seed(ranks)
    logits, targets = 3 * torch.randn(37, size), torch.randint(size, (37,))
    want = TorchSampling().score(logits, targets, top)
    first, *others = on_ranks(ranks, size, lambda part: part.score(own(logits, part), targets, top))
    assert all(equal(first, other) for other in others)
    assert first.top_ids.shape == want.top_ids.shape == (37, min(top, size))
    torch.testing.assert_close(first.values, want.values, atol=2e-6, rtol=0)
    same_ranking((first.top_ids, first.top_values), (want.top_ids, want.top_values), 2e-6)
    assert torch.equal(first.ranks, want.ranks)
    assert [t.dtype for t in first.tensors()] == [t.dtype for t in want.tensors()]


@settings(max_examples=40)
@given(st.sampled_from([2, 3, 4, 7]), st.integers(0, 10**6), st.booleans(), st.integers(1, 40))
def test_tokens_are_those_of_whole_rows(ranks: int, seed: int, filters: bool, rows: int) -> None:
    """With rows that are not finite, in one rank's part or everywhere, and equal maxima."""
    rng, size = np.random.default_rng(seed), 307
    logits = torch.from_numpy(rng.normal(0, 3, (rows, size)).astype(np.float32))
    logits[0, 9] = logits[0, 300] = 30.0
    for row, value in zip(range(1, rows), ("nan", "inf", "-inf"), strict=False):
        logits[row, int(rng.integers(size))] = float(value)
    logits[4:5] = float("-inf")
    logits[5:6, 100:] = float("-inf")
    metadata = metadata_of(rng, rows, filters)
    metadata.temperatures[0] = 0.0
    want = TorchSampling().choose(logits.clone(), metadata)
    made = on_ranks(ranks, size, lambda part: part.sample(own(logits, part), metadata))
    for tokens in made:
        assert torch.equal(tokens, made[0])
        same_draws(tokens, want, logits, metadata, ROUNDING)
    assert made[0][0] == want[0] == 9
    assert (want[1:3] == NO_TOKEN).all() and (want[4:5] == NO_TOKEN).all()


def test_exchanges_are_in_blocks_of_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, size, rows = np.random.default_rng(2), 307, 50
    logits = torch.from_numpy(rng.normal(0, 3, (rows, size)).astype(np.float32))
    metadata = metadata_of(rng, rows)
    metadata.top_k[:], metadata.temperatures[::3] = 30, 0.0
    want = TorchSampling().choose(logits.clone(), metadata)
    monkeypatch.setattr(vocabulary, "TABLE_BYTES", 1500)
    largest: list[int] = []
    all_to_all = Threads.all_to_all

    def noted(self: Threads, x: torch.Tensor) -> torch.Tensor:
        largest.append(x.nbytes)
        return all_to_all(self, x)

    monkeypatch.setattr(Threads, "all_to_all", noted)
    for made in on_ranks(3, size, lambda part: part.sample(own(logits, part), metadata)):
        same_draws(made, want, logits, metadata, ROUNDING)
    assert max(largest) <= 1500 and len(largest) > 3 * 5


def test_edits_reach_the_rank_that_has_the_token() -> None:
    rng, size, rows = np.random.default_rng(3), 307, 20
    logits = torch.from_numpy(rng.normal(0, 3, (rows, size)).astype(np.float32))
    pairs = np.sort(rng.permutation(rows * size)[:2000])
    edits = LogitsEdits(
        rows=pairs // size,
        tokens=pairs % size,
        factors=rng.choice(np.array([1.0, 1.3], np.float32), len(pairs)),
        subtracted=rng.normal(0, 2, len(pairs)).astype(np.float32),
    )
    want = logits.clone()
    vocabulary.apply(TorchKernels(), want, edits)
    metadata = metadata_of(rng, rows)

    def edited(part: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
        mine = own(logits, part)
        return part.sample(mine, metadata, (edits,)), mine

    made = on_ranks(4, size, edited)
    assert torch.equal(torch.cat([mine for _, mine in made], dim=1), want)
    tokens = TorchSampling().choose(want.clone(), metadata)
    for got, _ in made:
        assert torch.equal(got, made[0][0])
        same_draws(got, tokens, want, metadata, ROUNDING)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("subtracted", "token"), [(0.05, 7), (-0.05, 3)])
def test_a_penalty_too_small_for_the_logits_dtype_counts(
    ranks: int, subtracted: float, token: int
) -> None:
    """Of bfloat16, as logits are on a GPU, neighbours at 20 are 0.125 apart."""
    logits = torch.zeros((1, 40), dtype=torch.bfloat16)
    logits[0, 3] = logits[0, 7] = 20.0
    one = np.ones(1, np.float32)
    edits = LogitsEdits(np.zeros(1, np.int64), np.full(1, 3), one, one * np.float32(subtracted))
    metadata = metadata_of(np.random.default_rng(0), 1)
    metadata.temperatures[:] = 0.0
    for got in on_ranks(ranks, 40, lambda part: part.sample(own(logits, part), metadata, (edits,))):
        assert got.tolist() == [token]


class Largest(TorchFunctionMode):
    """The largest tensor that any operation made, in elements, and the most rows that are whole."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.elements = self.whole = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
                if tensor.dim() == 2 and tensor.shape[1] >= self.size:
                    self.whole = max(self.whole, len(tensor))
        return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_rows_of_logits_exist_nowhere(ranks: int) -> None:
    """Scoring and unfiltered sampling have none; filters have rows / ranks of them."""
    size, rows = 5000, 64
    rng = np.random.default_rng(4)
    logits, targets = torch.randn(rows, size), torch.randint(size, (rows,))
    filtered = metadata_of(rng, rows)
    filtered.top_k[:], filtered.temperatures[:] = 9, 1.0

    def measured(part: Vocabulary) -> tuple[Largest, Largest]:
        mine, seen = own(logits, part), (Largest(size), Largest(size))
        with seen[0]:
            part.score(mine, targets, 20)
            part.sample(mine, metadata_of(rng, rows, filters=False))
        with seen[1]:
            part.sample(mine, filtered)
        return seen

    share = rows * (-(-size // ranks // 16) * 16)
    for plain, some in on_ranks(ranks, size, measured):
        assert plain.whole == 0 and plain.elements <= share
        assert some.whole == rows // ranks and some.elements <= share + rows * 16
