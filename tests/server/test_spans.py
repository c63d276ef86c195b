"""Attention of images whose tokens see each other: plain torch against float64, and of a GPU's what
is around FlashInfer's kernels, which see one kind of sequences at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from float64_attention import expected
from spanned import Prompt, spanned

from kvline_server import kernels
from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.layout import GroupLayout, Layout, Spans
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import KVLayer, Scales
from kvline_server.memory.pages import PAGE_SIZE

WINDOWS = (0, 9, 40)  # shorter and longer than images
DECODES = ((1, 1), (50, 1), (33, 1))
DRAFTED = ((50, 1), (40, 3))  # with draft tokens
# Rows before, between and behind images, or none; images behind cached tokens, within a page and at
# its end, and of a row; a prompt of text and a step of images alone.
PROMPTS: tuple[Prompt, ...] = (
    (0, (5, -20, 7)),
    (0, (-20, -13, 1)),
    (37, (-16,)),
    (64, (3, -32, 2, -32)),
    (0, (30,)),
    (7, (2, -1, 4)),
)
STEPS: dict[str, tuple[tuple[tuple[int, int], ...], tuple[Prompt, ...]]] = {
    "mixed": (DECODES, PROMPTS),
    "drafts": (DRAFTED, PROMPTS[::-1]),
    "prompts": ((), PROMPTS),
    "one": ((), PROMPTS[:1]),
    "images": ((), PROMPTS[2:3]),
    "decodes-and-images": (DECODES, PROMPTS[2:3]),
    "text": (DECODES, PROMPTS[4:5]),
}
QUERIES, KEYS, DIM = 6, 2, 16


def cached(scales: Scales | None = None) -> KVLayer:
    keys, values = (torch.randn(60, PAGE_SIZE, KEYS, DIM) for _ in range(2))
    return KVLayer(keys, values, scales or Scales())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", STEPS)
def test_tokens_of_an_image_see_each_other_on_a_cpu(name: str, window: int) -> None:
    torch.manual_seed(0)
    attention, cache, layout = TorchKernels().attention, cached(), spanned(*STEPS[name])
    q = torch.randn(layout.rows, QUERIES, DIM)
    got = attention.attend(q, cache, attention.plan(layout, 0, window), scale=0.4)
    want = expected(q, cache, layout, window, 0.4)
    torch.testing.assert_close(got.view_as(want).double(), want, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True, slots=True)
class Runner:
    """In the place of PagedAttention: attends to what its tables say, with its mask alone."""

    causal: bool
    window: int

    def plan(self, table: PageTables) -> PageTables:
        host = table.row_starts, table.page_starts, (table.lengths - 1) % PAGE_SIZE + 1
        device = table.device_row_starts, table.device_page_starts, table.last_page
        for given, uploaded in zip(host, device, strict=True):
            assert uploaded.numpy().dtype == given.dtype == np.int32
            assert np.array_equal(uploaded.numpy(), given)
        assert table.row_starts[0] == table.page_starts[0] == 0
        assert len(table.pages) == table.page_starts[-1]
        return table

    def run(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        table: PageTables,
        scale: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        assert sinks is None and out.is_contiguous() and len(q) == table.row_starts[-1]
        none, at = np.zeros(0, np.int64), table.row_starts
        group = GroupLayout(table.lengths, table.page_starts, table.pages.numpy(), none, none)
        spans = None if self.causal else Spans(at[:-1], at[1:])
        layout = Layout(0, at, np.zeros(len(q), np.int32), (group,), spans=spans)
        out.copy_(expected(q, KVLayer(cache.keys, cache.values), layout, self.window, scale))


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """Of a GPU's attention, where FlashInfer is not installed."""
    enums = dict.fromkeys(("MaskMode", "PosEncodingMode", "TensorLayout"))
    stubs = {"": {}, ".prefill": {"get_batch_prefill_module": None}, ".utils": enums}
    names = [f"{each}_attention" for each in ("gpu", "flashinfer")]
    with pytest.MonkeyPatch.context() as patch:
        for name, has in stubs.items():
            patch.setitem(sys.modules, f"flashinfer{name}", SimpleNamespace(**has))
        for name in names:
            patch.delitem(sys.modules, f"{kernels.__name__}.{name}", raising=False)
            patch.delattr(kernels, name, raising=False)
        yield importlib.import_module(f"{kernels.__name__}.{names[0]}")
        for name in names:  # no other test gets these
            del sys.modules[f"{kernels.__name__}.{name}"]
            delattr(kernels, name)


@pytest.fixture
def attention_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], Any]:
    """With runners of this file for a window, one of spans among them or none."""

    def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(each.copy()) for each in arrays]

    monkeypatch.setattr(module, "upload", upload)

    def make(window: int, two_way: bool) -> Any:
        made = object.__new__(module.GpuAttention)
        made.device = torch.device("cpu")
        decode, prefill, spans = (Runner(causal, window) for causal in (False, True, False))
        made._runners = {window: module.Runners(decode, prefill, spans if two_way else None)}
        return made

    return make


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_s_kernels_get_each_kind_of_rows_and_their_outputs_are_put_back(
    name: str, window: int, attention_of: Callable[[int, bool], Any]
) -> None:
    """Of one of two groups of layers, of queries that lie beside keys and values, over a cache with
    scales, and into what a graph reads."""
    torch.manual_seed(1)
    layout, cache = spanned(*STEPS[name]), cached(Scales(0.5, 3.0))
    (own,) = layout.groups
    other = replace(own, pages=own.pages[::-1].copy())
    made = attention_of(window, layout.spans is not None)
    plan = made.plan(replace(layout, groups=(other, own)), 1, window)
    q = torch.randn(layout.rows, QUERIES + 2 * KEYS, DIM)[:, :QUERIES]
    room = torch.full((layout.rows + 1, QUERIES * DIM), 7.0)
    got = made.attend(q, cache, plan, room[:-1], scale=0.4)
    want = expected(q, cache, layout, window, 0.4)
    torch.testing.assert_close(got.view_as(want).double(), want, rtol=1e-5, atol=1e-5)
    assert got.data_ptr() == room.data_ptr() and (room[-1] == 7.0).all()
    again = made.attend(q, cache, plan, scale=0.4)  # of the next layer
    assert torch.equal(again, got)


def test_a_step_has_a_plan_of_each_kind_that_is_in_it(
    attention_of: Callable[[int, bool], Any],
) -> None:
    """Kernels run only where they have rows, and decodes with draft tokens row by row."""
    kinds = {"mixed": 3, "drafts": 3, "prompts": 2, "one": 2, "images": 1, "text": 2}
    for name, parts in kinds.items():
        layout = spanned(*STEPS[name])
        made = attention_of(0, True)
        plan = made.plan(layout, 0, 0)
        assert len(plan.parts) == parts
        assert (plan.moved is None) == (layout.spans is None)
        rows = [np.diff(part.planned.row_starts).tolist() for part in plan.parts]
        if name == "one":
            assert rows == [[5, 7], [20]]
            assert plan.parts[1].planned.lengths.tolist() == [25]
            assert plan.moved.tolist() == [*range(5), *range(25, 32), *range(5, 25)]
        if name == "drafts":
            assert rows[0] == [1, 1, 1, 1] and sorted(rows[2]) == [1, 13, 16, 20, 20, 32, 32]


def test_an_image_of_one_token_is_a_decode_where_it_is_alone(
    attention_of: Callable[[int, bool], Any],
) -> None:
    torch.manual_seed(2)
    layout, cache, made = spanned(DECODES, PROMPTS[:1]), cached(), attention_of(0, True)
    assert layout.spans is not None
    starts, ends = (
        np.insert(each, 0, at) for each, at in zip(astuple(layout.spans), (1, 2), strict=True)
    )
    layout = replace(layout, spans=Spans(starts, ends))
    q = torch.randn(layout.rows, QUERIES, DIM)
    plan = made.plan(layout, 0, 0)
    assert [part.rows for part in plan.parts] == [slice(0, 3), slice(3, 15), slice(15, 35)]
    want = expected(q, cache, layout, 0, 0.4)
    got = made.attend(q, cache, plan, scale=0.4).view_as(want)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("causal", "window", "row_starts", "whole"),
    [
        (False, 40, [0, 20, 40], True),
        (False, 0, [0, 20, 40], False),
        (True, 40, [0, 20, 40], False),
        (False, 40, [0, 1, 2], False),  # decodes
    ],
)
def test_fa2_splits_no_tokens_of_images_that_a_window_bounds(
    module: Any, causal: bool, window: int, row_starts: list[int], whole: bool
) -> None:
    """It counts parts of what causal rows see: those behind would be of none."""
    paged: Any = module.PagedAttention
    made, given = object.__new__(paged), list[Any]()
    made._shape, made._floats, made._stagings, made._turn = (8, 4, 256), None, [(None, None)], 0
    made._causal, made._left, made._splits, made._blocks = causal, window - 1, True, 264
    made._module = SimpleNamespace(plan=lambda *words: given.extend(words))
    rows, pages, lengths = (np.array(n, np.int32) for n in (row_starts, [0, 5, 9], [70, 60]))
    made.plan(PageTables(rows, pages, lengths, *[torch.empty(0)] * 4))
    assert given[14:] == [causal, window - 1, -1, whole, 0, 0]
