"""Decode attention over an fp8 KV cache on a GPU: our kernels against plain torch in Triton's
interpreter, and how a sequence's tokens are split."""

from __future__ import annotations

import pytest
import torch
from interpreted import SHARED, compiled, run

from kvline_server.kernels import cuda_attention, cuda_sinks, cuda_write
from kvline_server.kernels.cuda_attention import SPLITS, Fp8Decodes, fits, is_copied

SCRIPT = """
import math
import numpy as np, torch, triton, triton.language as tl
from interpreted import launcher
from kvline_server.kernels import cuda_attention, cuda_sinks, triton_attention
from kvline_server.kernels.cuda_attention import Fp8Decodes
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.attention import PageTables
from kvline_server.memory.arena import KVLayer

@triton.jit
def columns(pairs):
    low, high = pairs & 0xFF, (pairs >> 8) & 0xFF
    low = low.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)

triton_attention._columns = columns  # for instructions that the interpreter has not
cuda_attention.launch = cuda_sinks.launch = launcher(triton_attention)
torch.manual_seed(0)
lengths = [1, 16, 17, 128, 129, 330]
held = [-(-n // 16) for n in lengths]
starts = np.cumsum([0, *held]).astype(np.int32)
pages = torch.randperm(60)[: starts[-1]].to(torch.int32)
last = torch.tensor([(n - 1) % 16 + 1 for n in lengths], dtype=torch.int32)
rows = len(lengths)
table = PageTables(
    np.arange(rows + 1, dtype=np.int32), starts, np.asarray(lengths, np.int32),
    torch.arange(rows + 1), torch.from_numpy(starts), pages, last,
)
def shares(scores, sinks):  # a logit more, which is dropped after the softmax
    scores = scores if sinks is None else torch.cat((scores, sinks.double()[:, None]), dim=1)
    made = scores.softmax(dim=-1)
    return made if sinks is None else made[:, :-1]

for queries, keys, dim, processors, window, sunk in (
    (4, 2, 64, 1, 0, False), (8, 1, 128, 1, 0, False), (5, 1, 64, 4, 0, False),
    (32, 2, 64, 9, 0, False), (8, 1, 128, 40, 0, False), (4, 2, 64, 1, 17, False),
    (2, 1, 256, 40, 150, False), (2, 1, 256, 1, 0, False),
    (16, 2, 64, 1, 0, True), (16, 2, 64, 9, 0, True), (5, 1, 64, 1, 128, True),
    (8, 1, 128, 40, 150, True), (2, 1, 256, 1, 17, True),
):
    whole = torch.randn(60, 2, 2, 16, keys, dim).to(FP8)
    cache = KVLayer(whole[:, 1, 0], whole[:, 1, 1])
    q = torch.randn(rows, queries + 2 * keys, dim)[:, :queries]
    out = torch.full((rows, queries, dim), float("nan"))
    sinks = torch.linspace(-20, 20, queries).contiguous() if sunk else None
    made = Fp8Decodes(queries, keys, dim, processors, window)
    made.run(q, cache, made.plan(table), 0.3, out, sinks)
    for row, length in enumerate(lengths):
        own = pages[starts[row] : starts[row + 1]].long()
        k, v = (
            part[own].double().view(-1, keys, dim)[max(0, length - window) * (window > 0) : length]
            .repeat_interleave(queries // keys, 1)
            for part in (cache.keys, cache.values)
        )
        weights = shares(torch.einsum("hd,nhd->hn", q[row].double(), k) * 0.3, sinks)
        want = torch.einsum("hn,nhd->hd", weights, v)
        off = (out[row] - want).norm(dim=1) / want.norm(dim=1)  # of each head: sinks make some tiny
        assert off.max() < 2e-3, (queries, keys, dim, processors, window, length, off)

inf = float("inf")
for rows, heads, dim, nothing in (  # the last: log2 of a sum of no tokens, FlashInfer's too
    (1, 64, 64, None), (5, 3, 64, -5e4), (7, 8, 128, -inf), (3, 5, 256, -5e4),
):
    scores, sinks = torch.randn(rows, heads, 9).double() * 4, torch.linspace(-60, 60, heads)
    every = scores.softmax(dim=-1), torch.stack([shares(each, sinks) for each in scores])
    values = torch.randn(rows, 9, dim).double()
    plain, want = (torch.einsum("rhn,rnd->rhd", each, values) for each in every)
    room = torch.full((rows + 1, heads, dim), 7.0)
    out, log_sums = room[:rows], (scores.logsumexp(dim=-1) * math.log2(math.e)).float()
    out.copy_(plain)
    if nothing is not None:
        out[0, 0], log_sums[0, 0], want[0, 0] = 0, nothing, 0
    cuda_sinks.apply(out, log_sums, sinks)
    off = (out - want).norm(dim=2) / want.norm(dim=2).clamp(min=1e-30)
    assert off.max() < 2e-5 and (room[rows] == 7).all(), (rows, heads, dim, off)

for keys, dim in ((1, 64), (4, 128), (3, 64)):  # a part of a program, four, one and a half
    whole = torch.randn(60, 2, 2, 16, keys, dim).to(FP8)
    copy = torch.full((2, 50, 16, keys, dim), float("nan"))
    cuda_attention.copy_pages(KVLayer(whole[:, 1, 0], whole[:, 1, 1]), pages, copy)
    count = len(pages)
    for part in range(2):
        assert torch.equal(copy[part, :count], whole[pages.long(), 1, part].float())
    assert copy[:, count:].isnan().all()
"""


@pytest.mark.kernels
def test_the_gpu_s_kernels_give_what_torch_gives() -> None:
    """In Triton's interpreter: sequences that end within a page, at its end and in the next block,
    whole and in up to 32 parts, some of which have no token; windows that begin within a page and
    that hold a whole sequence; sinks far below and above all other logits."""
    run(SCRIPT)


@pytest.mark.kernels
def test_every_variant_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (*cuda_attention.variants(torch.bfloat16), *cuda_sinks.variants(torch.bfloat16))
    for name, made in compiled(every, monkeypatch):
        assert made.shared <= SHARED, name


@pytest.mark.parametrize(
    ("rows", "keys", "splits"), [(1, 1, SPLITS), (1, 8, SPLITS), (8, 8, 9), (64, 8, 2), (256, 8, 1)]
)
def test_tokens_are_split_where_rows_leave_processors_idle(
    rows: int, keys: int, splits: int
) -> None:
    assert Fp8Decodes(4 * keys, keys, 128, 132).splits(rows) == splits


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (112, 1), (113, 2), (1024, 9), (9000, 32)])
def test_a_window_is_split_into_no_more_parts_than_it_fills(window: int, splits: int) -> None:
    assert Fp8Decodes(8, 1, 128, 132, window).splits(1) == splits


@pytest.mark.parametrize(
    ("rows", "pages", "copied"), [(512, 512, True), (511, 512, False), (8192, 3000, False)]
)
def test_chunks_read_a_copy_that_has_room_and_no_more_pages_than_they_have_rows(
    rows: int, pages: int, copied: bool
) -> None:
    assert is_copied(rows, pages, 2048) == copied


def test_gpt_oss_heads_fit_our_kernels_on_one_rank_and_on_more() -> None:
    for ranks in (1, 2, 4, 8):
        heads = 64 // ranks, 8 // ranks
        cuda_write.check(*heads, 64)
        assert fits(*heads)


def test_more_queries_a_key_value_head_than_a_block_has_do_not_fit() -> None:
    assert fits(128, 8) and not fits(17, 1)
