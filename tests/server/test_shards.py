"""A rank's share of a model: which counts divide it, what each rank loads, and no more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import plain
from fp8_checkpoints import Plain
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.model import loader, shard
from kvline_server.model.attention import Attention
from kvline_server.model.blocks import MLP
from kvline_server.model.config import Experts as Many
from kvline_server.model.config import ModelConfig, read_config
from kvline_server.model.decoder import cache_groups
from kvline_server.model.experts import Experts
from kvline_server.model.layer import Layer
from kvline_server.model.linear import Rows, TensorSource
from kvline_server.model.loader import RandomSource, SafetensorsSource, Weights, load_weights
from kvline_server.model.positions import Rope
from kvline_server.model.shard import WHOLE, Shard

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=48,
    intermediate=96,
    heads=12,
    kv_heads=4,
    head_dim=8,
    vocabulary=307,
    max_position=64,
    norm_eps=1e-5,
    rope=Rope(10000.0),
)


class Recorded:
    """Another source, of which it keeps how many elements of each tensor were copied."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.copied: Counter[str] = Counter()
        self.check, self.fp8 = source.check, source.fp8
        self.has, self.count, self.shape = source.has, source.count, source.shape

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        self.copied[part.name] += into.numel()
        self.source.copy(part, into, column)


@pytest.mark.parametrize(
    ("change", "ranks", "counts"),
    [
        ({}, 3, "1, 2 or 4"),
        ({}, 5, "1, 2 or 4"),
        ({"heads": 64, "kv_heads": 8, "intermediate": 28672}, 6, "1, 2, 4 or 8"),
        ({"heads": 9, "kv_heads": 3, "intermediate": 1536}, 2, "1 or 3"),
        ({"intermediate": 99}, 2, "1"),
        ({"heads": 24, "kv_heads": 6}, 4, "1, 2, 3 or 6"),
        ({"heads": 8, "kv_heads": 1, "vocabulary": 41}, 8, "1, 2 or 4"),
    ],
)
def test_a_count_that_does_not_divide_is_refused_with_those_that_do(
    change: dict[str, int], ranks: int, counts: str
) -> None:
    model = replace(MODEL, **change)  # type: ignore[arg-type]
    heads = f"{model.heads} attention heads, {model.kv_heads} key-value heads"
    want = rf"spec.resources.gpus is {ranks}, .* {heads}.*; gpus can be {counts}$"
    with pytest.raises(ModelUnsupported, match=want):
        shard.check(model, ranks)
    for count in re.findall(r"\d", counts):
        shard.check(model, int(count))


sizes = st.integers(1, 8)


@given(sizes, st.integers(1, 16), sizes, st.integers(1, 2000))
def test_ranks_have_every_head_and_token_once_and_share_keys_evenly(
    group: int, kv_heads: int, ranks: int, vocabulary: int
) -> None:
    model = replace(MODEL, heads=group * kv_heads, kv_heads=kv_heads, vocabulary=vocabulary)
    model = replace(model, intermediate=840)
    try:
        shard.check(model, ranks)
    except ModelUnsupported:
        return
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    parts = [(s.of(model.heads), shard.kv_heads(model, s)) for s in shards]
    assert [head for heads, _ in parts for head in heads] == list(range(model.heads))
    used = Counter(key for _, keys in parts for key in keys)
    assert set(used) == set(range(kv_heads)) and len(set(used.values())) == 1
    for heads, keys in parts:  # as attention groups them
        assert [keys[at * len(keys) // len(heads)] for at in range(len(heads))] == [
            head // group for head in heads
        ]
    owned = [shard.vocabulary(model, s) for s in shards]
    assert [token for own in owned for token in own] == list(range(vocabulary))
    assert all(owned) and {len(own) for own in owned[:-1]} <= {len(owned[0])}
    assert len(owned[-1]) <= len(owned[0]) == shard.share(vocabulary, ranks)
    mine = shard.local(model, shards[-1])
    assert (mine.heads, mine.kv_heads) == tuple(len(part) for part in parts[-1])
    assert mine.vocabulary == vocabulary
    assert shard.local(model, WHOLE) == model


def test_a_large_vocabulary_is_cut_where_kernels_load_fast() -> None:
    for size in (128_256, 151_936, 32_003):
        for ranks in range(2, 9):
            assert shard.share(size, ranks) % shard.ALIGN == 0


def rank_of(folder: Path, config: ModelConfig, own: Shard) -> Weights:
    """Loaded from a folder, and nothing but what is counted before."""
    source, heard = Recorded(SafetensorsSource(folder)), []
    made = load_weights(source, config, Plain(), lambda *at: heard.append(at), own)
    elements = loader.checked(RandomSource(), config, own).counts.total()
    assert source.copied.total() == elements == made.counts.total()
    assert heard[-1] == (4 * elements, 4 * elements)
    return made


# phi4-mini is fused in its files, and rotates a part of each head.
FAMILIES = (
    "qwen3-vl-moe",
    "llama",
    "llama-tied",
    "qwen2",
    "olmo2",
    "gemma3",
    "phi4-mini",
    "gpt-oss",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_loads_its_slices_of_the_model_and_no_others(
    family: str, make_model: Callable[..., Path]
) -> None:
    folder = make_model(family)
    config = read_config(folder)
    whole = rank_of(folder, config, WHOLE)
    parts = [rank_of(folder, config, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)
    for rank, part in enumerate(parts):
        assert torch.equal(part.embedding, whole.embedding)
        tied = part.head.untyped_storage().data_ptr() == part.embedding.data_ptr()
        assert tied == config.tied_embeddings
        most = (whole.counts[None] + whole.embedding.numel()) / 2
        assert part.counts[None] < 1.06 * most  # norms are whole
        for mine, theirs in zip(part.layers, whole.layers, strict=True):
            compare(mine, theirs, config, Shard(rank, 2))


def compare(mine: Layer, whole: Layer, config: ModelConfig, own: Shard) -> None:
    c, local = config, shard.local(config, own)
    heads, keys = own.of(c.heads), shard.kv_heads(c, own)
    dims = [range(r.start * c.head_dim, r.stop * c.head_dim) for r in (heads, keys)]
    starts = (0, c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim)
    rows = [
        start + row
        for start, r in zip(starts, (dims[0], dims[1], dims[1]), strict=True)
        for row in r
    ]
    assert len(rows) == (local.heads + 2 * local.kv_heads) * c.head_dim
    one, other = mine.mixer, whole.mixer
    assert isinstance(one, Attention) and isinstance(other, Attention)
    assert torch.equal(plain(one.qkv), plain(other.qkv)[rows])
    if other.qkv.bias is not None:
        assert one.qkv.bias is not None and torch.equal(one.qkv.bias, other.qkv.bias[rows])
    assert torch.equal(plain(one.output), plain(other.output)[:, dims[0]])
    width = own.of(c.intermediate)
    gate = [start + row for start in (0, c.intermediate) for row in width]
    if c.experts is not None:
        same_experts(experts_of(mine), experts_of(whole), c.experts.count, gate, width)
    else:
        assert torch.equal(plain(mlp_of(mine).gate_up), plain(mlp_of(whole).gate_up)[gate])
        assert torch.equal(plain(mlp_of(mine).down), plain(mlp_of(whole).down)[:, width])
    if c.qk_norm == "projection":
        assert one.q_norm and one.k_norm and other.q_norm and other.k_norm
        assert torch.equal(one.q_norm.weight, other.q_norm.weight[dims[0]])
        assert torch.equal(one.k_norm.weight, other.k_norm.weight[dims[1]])


def mlp_of(layer: Layer) -> MLP:
    assert isinstance(layer.blocks[0], MLP)
    return layer.blocks[0]


def experts_of(layer: Layer) -> Experts:
    assert isinstance(layer.blocks[0], Experts)
    return layer.blocks[0]


def same_experts(mine: Experts, whole: Experts, count: int, gate: list[int], width: range) -> None:
    """Of each expert the rank's part; the router whole."""
    assert torch.equal(plain(mine.router), plain(whole.router))
    first, last = zip(*(weights_of(made) for made in (mine, whole)), strict=True)
    one, other = (made.view(count, -1, made.shape[1]) for made in first)
    assert torch.equal(one, other[:, gate])
    assert torch.equal(last[0], last[1][:, width])


def weights_of(made: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all experts of a layer, gate and up, and down."""
    first, last = made.layer.gate_up, made.layer.down
    assert isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor)
    return first, last


@pytest.mark.parametrize("experts", [None, Many(6, 2, True, "mlp.")], ids=["dense", "experts"])
@pytest.mark.parametrize("drawn", [1 << 24, 1000, 7])
def test_random_weights_of_ranks_are_slices_of_one_model(
    drawn: int, experts: Many | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fits into a block, and however a tensor's copy is cut."""
    monkeypatch.setattr(loader, "DRAWN", drawn)
    config = replace(MODEL, kv_heads=2, output_bias=True, mlp_bias=True, qkv_bias=True)
    config = replace(config, experts=experts)
    whole = load_weights(RandomSource(), config, Plain())
    last = [
        weights_of(layer.blocks[0])[1]
        if isinstance(layer.blocks[0], Experts)
        else plain(layer.blocks[0].down)
        for layer in whole.layers
    ]
    assert 0.015 < float(last[0].std()) < 0.025
    assert not torch.equal(*last)
    monkeypatch.setattr(loader, "COPY_BYTES", 900)
    for ranks in (2, 4):
        for rank in range(ranks):
            own = Shard(rank, ranks)
            part = load_weights(RandomSource(), config, Plain(), shard=own)
            compare(part.layers[1], whole.layers[1], config, own)
            tokens = shard.vocabulary(config, own)
            assert torch.equal(part.head, whole.head[tokens])
            # The sum of the ranks' outputs has the bias once.
            if experts is None:
                assert (mlp_of(part.layers[0]).down.bias is None) == (rank > 0)


def test_a_wrong_tensor_is_named_on_every_rank(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also one of which a rank has nothing: all end with the same error, and nobody waits."""
    config = replace(read_config(make_model("qwen2")), output_bias=True)
    for rank in range(2):
        with pytest.raises(ModelInvalid, match=r"o_proj.bias is in no safetensors file"):
            load_weights(
                SafetensorsSource(make_model("qwen2")), config, Plain(), shard=Shard(rank, 2)
            )


def test_a_rank_maps_no_more_of_a_file_than_its_rows(tmp_path: Path) -> None:
    """Measured: pages of the file that this process has touched."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4096, 2048)}, file)
    whole = file.stat().st_size
    source = SafetensorsSource(tmp_path)
    source.copy(Rows("w", range(2048, 3072), 4096), torch.empty(1024, 2048))
    touched = resident(file)
    assert whole / 4 <= touched < whole / 4 + (4 << 20)  # whole blocks are mapped
    source.copy(Rows("w", range(4096), 4096), torch.empty(4096, 1024), column=1024)
    assert resident(file) > whole / 2


def resident(file: Path) -> int:
    """Bytes of a mapped file in this process's page tables."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_the_cache_keeps_a_rank_s_heads_alone() -> None:
    (whole,) = cache_groups(MODEL, 64, torch.bfloat16)
    for ranks, share in ((2, 2), (4, 4)):
        (mine,) = cache_groups(shard.local(MODEL, Shard(0, ranks)), 64, torch.bfloat16)
        assert mine.page_bytes * share == whole.page_bytes
    model = replace(MODEL, heads=8, kv_heads=1)
    (mine,) = cache_groups(shard.local(model, Shard(3, 4)), 64, torch.bfloat16)
    assert mine.shape.heads == 1
