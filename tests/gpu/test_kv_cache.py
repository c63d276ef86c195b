"""An fp8 KV cache on the GPU: our write and FlashInfer's attention against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import GEMMA, PAGES, engine, hidden, sequence, sides

from kvline_server.engine.batch import build
from kvline_server.engine.work import Kind, Work
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.attention import Heads, PageTables, SlotMapping
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import KVLayer, KVShape, Scales
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.model.config import ModelConfig
from kvline_server.model.positions import Rope
from kvline_server.model.rope import cos_sin

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
SCALES = Scales(0.02, 0.03)
# Queries, keys and values, size; the third splits a chunk into the most parts.
SHAPES = [(8, 2, 128), (32, 32, 64), (64, 8, 128), (14, 2, 64), (8, 1, 128), (16, 8, 256)]


def on_gpu(heads: tuple[int, int, int]) -> Kernels:
    from flashinfer.jit.core import MissingJITCacheError

    from kvline_server.kernels.flashinfer import FlashInferKernels

    try:
        return FlashInferKernels(*heads, cache=FP8)
    except MissingJITCacheError:
        if heads[2] != 64:  # an image has it, a kit need not
            raise
        pytest.skip("these prebuilt kernels have none for an fp8 KV cache of head size 64")


def layer(heads: tuple[int, int, int], pages: int, scales: Scales = SCALES) -> KVLayer:
    """One of two layers of an arena, so that pages are no neighbours."""
    from kvline_server.memory.cuda import CudaArena

    arena = CudaArena(KVShape(2, heads[1], heads[2], FP8, (Scales(), scales)), pages)
    arena.resize(pages)
    return arena.layers()[1]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", SHAPES)
def test_what_is_written_is_what_torch_writes(heads: tuple[int, int, int], normed: bool) -> None:
    """Queries too; numbers beyond the range are the largest, and none is a NaN. Neighbours in e4m3
    are for those that stand between two."""
    torch.manual_seed(0)
    rows, (queries, keys, dim) = 70, heads
    given = torch.randn(rows, queries + 2 * keys, dim, device="cuda").mul_(3).bfloat16()
    given[5, queries:] *= 1e4
    norm = torch.rand(dim, device="cuda").bfloat16() + 0.5
    positions = torch.randint(900, (rows,), device="cuda", dtype=torch.int32)
    mapping = SlotMapping(positions, torch.randperm(10 * PAGE_SIZE, device="cuda")[:rows])
    made = []
    pair: list[Kernels] = [TorchKernels(device="cuda"), on_gpu(heads)]
    for kernels in pair:
        cache, own = layer(heads, 10), norm.to(kernels.dtype) if normed else None
        fused = given.to(kernels.dtype, copy=True)
        rope = kernels.attention.rope_table(*cos_sin(Rope(500_000.0), dim, 1000))
        kernels.attention.write(Heads(fused, queries, keys, own, own, 1e-5), rope, mapping, cache)
        stored = torch.stack((cache.keys.float(), cache.values.float()))
        made.append((fused[:, :queries].float(), stored))
    (q, want), (own_q, got) = made
    torch.testing.assert_close(own_q, q, rtol=1e-2, atol=1e-2)
    assert got.isfinite().all() and got.abs().max() == 448 == want.abs().max()
    torch.testing.assert_close(got, want, rtol=0.13, atol=2**-8)
    assert (got == want).float().mean() > 0.999


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("scales", [Scales(), Scales(0.4, 0.03)])
def test_attention_over_it_is_torch_s(heads: tuple[int, int, int], scales: Scales) -> None:
    """Decodes beside chunks of short and of long prompts, and chunks alone: those over a copy in
    bfloat16, and short ones of long prompts over the cache itself."""
    torch.manual_seed(1)
    queries, _, dim = heads
    pair: list[Kernels] = [TorchKernels(torch.bfloat16, device="cuda"), on_gpu(heads)]
    cache = layer(heads, 2000, scales)
    for part in (cache.keys, cache.values):
        part.copy_((torch.randn(part.shape, device="cuda") / scales.keys).clamp_(-448, 448).to(FP8))
    rng = np.random.default_rng(0)
    for decodes, chunks, copied in (
        ([700, 1, 33], [(0, 40), (16, 90)], True),
        ([], [(20_000, 100)], False),
        ([], [(20_000, 16)], False),
        ([9_000], [(5_000, 1_000)], True),
    ):
        free = rng.permutation(np.arange(1, 2000)).tolist()
        work = [Work(sequence(rng, n, free), n - 1, 1, Kind.DECODE) for n in decodes]
        work += [Work(sequence(rng, start + n, free), start, n, Kind.PROMPT) for start, n in chunks]
        layout = build(work).step.layout
        q = torch.randn(layout.rows, queries, dim, device="cuda").bfloat16()
        groups = [kernels.attention for kernels in pair]
        want, got = (a.attend(q, cache, a.plan(layout, 0, 0)).float() for a in groups)
        assert (groups[1].plan(layout, 0, 0).prefill.copied is not None) == copied
        assert got.isfinite().all()
        distance = float((got - want).norm() / want.norm())
        assert distance < 1e-2, (decodes, chunks, distance)


@pytest.mark.parametrize("heads", [*SHAPES, (32, 2, 128), (5, 1, 64)])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_decodes_are_torch_s_and_a_nan_stays_with_its_sequence(
    heads: tuple[int, int, int], rows: int
) -> None:
    """Of few rows, whose tokens are split among processors, and of many."""
    from kvline_server.kernels.cuda_attention import Fp8Decodes

    torch.manual_seed(2)
    queries, keys, dim = heads
    reference, cache = TorchKernels(torch.bfloat16, device="cuda"), layer(heads, 20_000)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, device="cuda").mul_(60).clamp_(-448, 448).to(FP8))
    rng = np.random.default_rng(0)
    free = rng.permutation(np.arange(1, 20_000)).tolist()
    lengths = rng.integers(1, 18_000 if rows == 1 else 900, rows)
    members = [sequence(rng, int(n), free) for n in lengths]
    layout = build([Work(s, len(s.tokens) - 1, 1, Kind.DECODE) for s in members]).step.layout
    fused = torch.randn(rows, queries + 2 * keys, dim, device="cuda").bfloat16()
    q, scale = fused[:, :queries], SCALES.keys * dim**-0.5
    (group,) = layout.groups
    on_device = reference.upload(layout.row_starts, group.page_starts, group.pages)
    last = reference.upload(((group.lengths - 1) % PAGE_SIZE + 1).astype(np.int32))
    tables = layout.row_starts, group.page_starts, group.lengths
    ours = Fp8Decodes(*heads, torch.cuda.get_device_properties(0).multi_processor_count)
    table = ours.plan(PageTables(*tables, *on_device, *last))
    for broken in (False, True):
        if broken:
            cache.keys[members[-1].table.groups[0].pages[0], 0] = float("nan")
        out = torch.full((rows, queries, dim), float("nan"), device="cuda").bfloat16()
        ours.run(q, cache, table, scale, out)
        attention = reference.attention
        want = attention.attend(q, cache, attention.plan(layout, 0, 0)).view_as(out)
        sound = rows - broken
        got, want = out[:sound].float(), want[:sound].float() / SCALES.values
        if sound:
            assert float((got - want).norm() / want.norm()) < 1e-2
        assert out[sound:].isnan().all()


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, 5e-2),
        ({"head_dim": 64}, 5e-2),
        ({"qk_norm": True}, 5e-2),
        ({"qk_norm": True} | GEMMA, 0.1),
    ],
    ids=["llama", "head64", "qk-norm", "gemma"],
)
def test_a_mixed_step_is_near_the_reference_with_an_fp8_cache(
    shape: Callable[..., ModelConfig], more: dict[str, Any], most: float
) -> None:
    """As test_kernels.py's of bfloat16, with wider bounds: numbers of the two sides that differ
    by little may be neighbours in e4m3. Plain torch is off by 2.5e-2, of a Gemma by 6.8e-2."""
    config = shape(**more)
    on_gpu((8, 2, config.head_dim))
    pair = sides(config, scales=(Scales(0.02, 0.02),) * 3)
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, PAGES)).tolist()
    groups = len(pair[0][0].windows)
    a, b = (sequence(rng, n, free, groups) for n in (37, 500))
    for work in (
        [Work(a, 0, 36, Kind.PROMPT), Work(b, 0, 300, Kind.PROMPT)],
        [Work(a, 36, 1, Kind.DECODE), Work(b, 300, 199, Kind.PROMPT)],
        [Work(s, len(s.tokens) - 1, 1, Kind.DECODE) for s in (a, b)],
    ):
        want, got = (hidden(side, work) for side in pair)
        distance = float((got - want).norm() / want.norm())
        assert distance < most, distance


def test_an_engine_with_graphs_and_chunks_repeats_itself(shape: Callable[..., ModelConfig]) -> None:
    """Greedy outputs of prompts whole and from the prefix cache: the cache has the same bytes."""
    made = engine(shape(), scales=(SCALES,) * 3)
    answers = []
    for _ in range(2):
        for id in range(5):
            prompt = [(31 * id + 7 * at) % 5000 for at in range(100 + 90 * id)]
            made.submit(id, prompt, SamplingParams(8, 0.0, ignore_eos=True))
        found: dict[int, list[int]] = {}
        while not made.idle:
            for output in made.step():
                found.setdefault(output.sequence.id, []).extend(output.tokens)
        answers.append(found)
    assert all(len(tokens) == 8 for tokens in answers[0].values())
    first = {id: tokens[0] for id, tokens in answers[0].items()}
    assert first == {id: tokens[0] for id, tokens in answers[1].items()}


def test_a_start_without_the_module_falls_back_to_torch_with_a_warning(
    shape: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvline_server.kernels import flashinfer_attention
    from kvline_server.kernels.group import ALONE
    from kvline_server.worker import backend

    def lacking(*_words: object, **_more: object) -> None:
        raise FileNotFoundError(2, "no such module")

    monkeypatch.setattr(flashinfer_attention, "get_batch_prefill_module", lacking)
    warnings: list[str] = []
    kernels = backend._cuda_kernels(warnings.append, FP8, shape(), ALONE, (0,), None)
    assert isinstance(kernels, TorchKernels) and kernels.device.type == "cuda"
    assert "using torch's slower ones" in warnings[0]
