"""Attention sinks: a logit of each head, in its softmax, without a value. Plain torch against
float64, and what a model and its ranks load of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import key_values, mapped
from float64_attention import expected
from safetensors.torch import save_file
from test_shards import MODEL as OTHER

from kvline_contract.memory import SCALES
from kvline_server.errors import ModelInvalid
from kvline_server.kernels import torch_attention
from kvline_server.kernels.layout import GroupLayout, Layout, starts
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import KVLayer, Scales
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.model.attention import Attention
from kvline_server.model.decoder import Decoder
from kvline_server.model.loader import RandomSource, SafetensorsSource, checked, load_weights
from kvline_server.model.mixer import Projected
from kvline_server.model.shard import Shard

WINDOW = 21
# Tokens of each sequence and how many of them are rows: under, at and over the window. Decodes have
# one row each, or a draft token's too.
DECODES = [(1, 1), (WINDOW - 1, 1), (WINDOW, 1), (WINDOW + 1, 1), (70, 1), (40, 3), (22, 3)]
CHUNKS = [(7, 7), (WINDOW, WINDOW), (50, 50), (90, 13), (30, 25)]
STEPS = [(DECODES, CHUNKS), (DECODES, []), ([], CHUNKS[2:3])]
MODEL = replace(OTHER, sinks=True)


def planned(decodes: list[tuple[int, int]], chunks: list[tuple[int, int]]) -> Layout:
    every = decodes + chunks
    lengths, rows = (np.array(numbers, np.int32) for numbers in zip(*every, strict=True))
    held = -(-lengths // PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(np.arange(1, 1 + held.sum())).astype(np.int32)
    positions = [np.arange(length - own, length) for length, own in every]
    none = np.zeros(0, np.int64)
    group = GroupLayout(lengths, starts(held), pages, none, none)
    return Layout(len(decodes), starts(rows), np.concatenate(positions).astype(np.int32), (group,))


def cached(dtype: torch.dtype, scales: Scales | None = None) -> KVLayer:
    shape = (60, PAGE_SIZE, 2, 16)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    return KVLayer(keys, values, scales or Scales())


@pytest.mark.parametrize("scores", [1, 3000, 1 << 21], ids=["row", "rows", "whole"])
@pytest.mark.parametrize("window", [0, 1, WINDOW])
def test_a_sink_has_a_share_of_the_softmax_and_no_value(
    window: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far below the other logits, among them and far above; row by row, in blocks and at once; a
    plan that attention without sinks has used too."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch_attention, "SCORES", scores)
    attention, cache = TorchKernels().attention, cached(torch.float32)
    sinks = torch.tensor([-30.0, -2.0, 0.0, 1.5, 8.0, 30.0])
    for decodes, chunks in STEPS:
        layout = planned(decodes, chunks)
        q = torch.randn(layout.rows, 6 + 2 * 2, 16)[:, :6]
        want = expected(q, cache, layout, window, 0.4, sinks)
        plan = attention.plan(layout, 0, window)
        for used in (False, True):
            if used:
                plain = attention.attend(q, cache, plan, scale=0.4)
                none = torch.full((6,), float("-inf"))
                same = attention.attend(q, cache, plan, scale=0.4, sinks=none)
                torch.testing.assert_close(same, plain, rtol=1e-5, atol=1e-6)
            got = attention.attend(q, cache, plan, scale=0.4, sinks=sinks).view_as(want)
            off = (got - want).norm(dim=2) / want.norm(dim=2)  # of each head: some are tiny
            assert float(off.max()) < 1e-5, (decodes, chunks, used, off.max())


def test_a_sink_is_of_the_numbers_that_an_fp8_cache_stands_for() -> None:
    torch.manual_seed(1)
    attention, cache = TorchKernels().attention, cached(torch.float8_e4m3fn, Scales(0.3, 0.02))
    sinks, layout = torch.linspace(-5, 5, 6), planned(DECODES, CHUNKS)
    q = torch.randn(layout.rows, 6, 16) * 4
    out = torch.full((layout.rows, 6 * 16), float("nan"))
    got = attention.attend(q, cache, attention.plan(layout, 0, WINDOW), out, None, sinks)
    assert got is out
    want = expected(q, cache, layout, WINDOW, 0.25, sinks)
    torch.testing.assert_close(got.view_as(want).double(), want, rtol=1e-4, atol=1e-6)


def test_a_nan_stays_with_its_sequence() -> None:
    attention, cache, layout = TorchKernels().attention, cached(torch.float32), planned(DECODES, [])
    (held,) = layout.groups
    cache.values[held.pages[-1], 0] = float("nan")
    q = torch.randn(layout.rows, 6, 16)
    got = attention.attend(q, cache, attention.plan(layout, 0, 0), sinks=torch.zeros(6))
    broken = int(layout.row_starts[-2])
    assert got[:broken].isfinite().all() and got[broken:].isnan().any(1).all()


def test_each_rank_has_the_sinks_of_its_heads_in_float32(tmp_path: Path) -> None:
    """Whatever the model's dtype; no part of the memory that scales of weights take."""
    kernels = TorchKernels(torch.bfloat16)
    names = checked(source := RandomSource(), MODEL)
    assert source.shapes["model.layers.1.self_attn.sinks"] == (12,)
    assert names.counts[torch.float32] == 2 * 12
    tensors = {name: torch.randn(shape) for name, shape in source.shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            own = Shard(rank, ranks)
            made = load_weights(SafetensorsSource(tmp_path), MODEL, kernels, shard=own)
            for index, layer in enumerate(made.layers):
                assert isinstance(layer.mixer, Attention)
                got = layer.mixer.sinks
                want = tensors[f"model.layers.{index}.self_attn.sinks"][list(own.of(12))]
                assert got is not None and got.dtype == torch.float32 and torch.equal(got, want)
            parts = made.parts()
            assert SCALES not in {part.name for part in parts}
            assert sum(part.fixed for part in parts) == made.nbytes(torch.bfloat16)


def test_a_file_without_them_is_refused_by_name(tmp_path: Path) -> None:
    checked(source := RandomSource(), replace(MODEL, sinks=False))
    tensors = {name: torch.zeros(shape) for name, shape in source.shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=r"tensor model\.layers\.0\.self_attn\.sinks is in no"):
        checked(SafetensorsSource(tmp_path), MODEL)


def test_a_decoder_gives_each_layer_its_own() -> None:
    made = Decoder(MODEL, load_weights(RandomSource(), MODEL, TorchKernels()), 64, TorchKernels())
    layout = planned([(9, 1)], [(30, 30)])
    plans, layers = made.plan(layout), key_values(mapped(made, 64, 8))
    q = torch.randn(layout.rows, 12, 8)
    for index, kv in enumerate(layers):
        for part in (kv.keys, kv.values):
            part.normal_()
        mixer = made.weights.layers[index].mixer
        assert isinstance(mixer, Attention)
        sinks = mixer.sinks
        assert sinks is not None
        sinks.uniform_(-3, 3)
        got = made.run(index, Projected((q,)), kv, plans).view_as(q).double()
        want = expected(q, kv, layout, 0, 8**-0.5, sinks)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
