"""Experts in MXFP4: what they stand for, against transformers, cut for ranks, random ones, and what
is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import decoder, engine, finish, greedy
from families import reference
from fp8_checkpoints import CONFIGS, loaded
from mxfp4_checkpoints import CONFIG, change, checkpoints, packed
from safetensors.torch import load_file, save_file

from kvline_contract import memory
from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels import cuda_mxfp4, mxfp4
from kvline_server.kernels.experts import ExpertWeight, Given
from kvline_server.kernels.mxfp4 import Mxfp4Weight, PackedMxfp4, Packing
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_experts import TorchExperts
from kvline_server.model import shard
from kvline_server.model.config import read_config
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.experts import Experts
from kvline_server.model.loader import RandomSource, SafetensorsSource, checked, load_weights
from kvline_server.model.quantization import MXFP4_BLOCK
from kvline_server.model.shard import WHOLE, Shard

FIRST = "model.layers.0.mlp.experts."
WINDOW = 8


@pytest.fixture(scope="module")
def both(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A folder with experts in MXFP4, and one of the weights that they stand for."""
    return checkpoints(make_model("gpt-oss"), tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture
def mine(both: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first, to be changed."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((both[0] / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_64_tokens_and_all_logits_are_those_of_transformers(
    both: tuple[Path, Path], length: int
) -> None:
    """With prompts under, at and over the window, of the weights that MXFP4 stands for."""
    prompt = [(31 * length + 7 * at) % 300 for at in range(length)]
    made = engine(both[0])
    made.submit(0, list(prompt), greedy(64, logprobs=20, prompt_logprobs=20))
    (outputs,) = finish(made).values()
    tokens = [token for output in outputs for token in output.tokens]
    model: Any = reference(both[1])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    assert logits[length - 1 : -1].argmax(dim=1).tolist() == tokens
    want = logits.log_softmax(dim=1)
    scores = [output.scores for output in outputs]
    if length > 1:
        scores.insert(0, outputs[0].prompt_scores)
    values = torch.cat([torch.as_tensor(each.top_values) for each in scores if each is not None])
    assert torch.allclose(values, want[:-1].topk(20).values, atol=1e-4)


def test_both_forms_of_one_model_answer_alike(both: tuple[Path, Path]) -> None:
    """In MXFP4, and in plain tensors of all experts, which transformers saves transposed."""
    found = []
    for folder in both:
        made = engine(folder)
        made.submit(0, list(range(20, 95)), greedy(8, prompt_logprobs=2))
        (outputs,) = finish(made).values()
        assert outputs[0].prompt_scores is not None
        tokens = [token for output in outputs for token in output.tokens]
        found.append((tokens, outputs[0].prompt_scores.values.tolist()))
    assert found[0] == found[1]


class PackingExperts(TorchExperts):
    """A GPU's layout."""

    def packing(self, rows: int, inputs: int, device: torch.device) -> Packing:
        made = cuda_mxfp4.packing(rows, inputs, device)

        def put(some: Mxfp4Weight, at: int) -> None:
            assert some.nbytes <= 2 * PACKED_BYTES, "more than a part of both layouts at once"
            cuda_mxfp4.pack(made, some, at)

        return Packing(made, put)


PACKED_BYTES = 3000


@pytest.mark.parametrize("own", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_what_a_gpus_layout_adds_is_known_before_any_is_read(
    both: tuple[Path, Path], own: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of 64, or 32 of a rank, are padded to 128. They are read and packed part by part."""
    monkeypatch.setattr("kvline_server.model.loader.PACKED_BYTES", PACKED_BYTES)
    kernels, config = TorchKernels(), read_config(both[0])
    kernels.experts = PackingExperts(kernels.rows)
    source = Dequantised(SafetensorsSource(both[0]), config.quantization)
    known = checked(source, config, own, kernels).nbytes(torch.float32)
    heard: list[tuple[int, int]] = []
    made, plain = loaded(both[0], own, kernels, heard), loaded(both[0], own)
    assert known == made.nbytes(torch.float32) == sum(part.fixed for part in made.parts())
    assert heard[-1] == (plain.nbytes(torch.float32),) * 2  # of the files
    packed = 0
    for layer, other in zip(made.experts(), plain.experts(), strict=True):
        for name in ("gate_up", "down"):
            got, want = (getattr(each.layer, name) for each in (layer, other))
            want = cuda_mxfp4.packed(want)
            assert torch.equal(got.values, want.values) and torch.equal(got.scales, want.scales)
            packed += got.nbytes - getattr(other.layer, name).nbytes
    assert known - plain.nbytes(torch.float32) == packed > 0


@pytest.mark.parametrize("own", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_a_rank_has_its_columns_of_every_expert_gate_before_up(
    both: tuple[Path, Path], own: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both forms, in copies of few rows too."""
    monkeypatch.setattr("kvline_server.model.loader.COPY_BYTES", 600)
    plain = load_file(both[1] / "model.safetensors")
    columns = own.of(64)
    for folder in both:
        heard: list[tuple[int, int]] = []
        weights = loaded(folder, own, heard=heard)
        assert heard[-1] == (weights.nbytes(torch.float32),) * 2
        assert max(b - a for (a, _), (b, _) in pairwise(heard)) <= 600
        for index, each in enumerate(weights.layers):
            assert isinstance(each.blocks[0], Experts)
            at, layer = f"model.layers.{index}.mlp.", each.blocks[0].layer
            whole = {
                name: plain[f"{at}experts.{name}"]
                for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
            }
            gate, up = (whole["gate_up_proj"].transpose(1, 2)[:, odd::2] for odd in (0, 1))
            want = torch.cat([half[:, columns.start : columns.stop] for half in (gate, up)], dim=1)
            assert torch.equal(plain_of(layer.gate_up).view(want.shape), want)
            want = whole["down_proj"].transpose(1, 2)[:, :, columns.start : columns.stop]
            assert torch.equal(plain_of(layer.down).view(want.shape), want)
            halves = [whole["gate_up_proj_bias"][:, odd::2] for odd in (0, 1)]
            want = torch.cat([half[:, columns.start : columns.stop] for half in halves], dim=1)
            assert layer.gate_up_bias is not None and torch.equal(layer.gate_up_bias, want)
            assert (layer.down_bias is None) == (own.rank > 0)
            if layer.down_bias is not None:
                assert torch.equal(layer.down_bias, whole["down_proj_bias"])
            assert each.blocks[0].router.bias is not None
            assert torch.equal(each.blocks[0].router.bias, plain[f"{at}router.bias"])
            assert isinstance(layer.down, Mxfp4Weight) == (folder == both[0])


def plain_of(weight: ExpertWeight) -> torch.Tensor:
    assert not isinstance(weight, PackedMxfp4)
    return weight.dequantised() if isinstance(weight, Mxfp4Weight) else weight


@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("gate_up_proj_blocks", "missing", "is in no safetensors file"),
        ("down_proj_scales", "missing", "is in no safetensors file"),
        ("gate_up_proj_bias", "missing", "is in no safetensors file"),
        (
            "gate_up_proj_scales",
            "shape",
            "has shape [4, 128], config.json requires [4, 128, 2]",
        ),
        ("down_proj_blocks", "shape", "has shape [4, 64], config.json requires [4, 64, 2, 16]"),
        ("down_proj_bias", "shape", "has shape [4], config.json requires [4, 64]"),
        ("down_proj_blocks", "dtype", "is F32, in MXFP4 it must be U8"),
        ("gate_up_proj_scales", "dtype", "is F32, in MXFP4 it must be U8"),
    ],
)
@pytest.mark.parametrize("own", [Shard(0, 2), Shard(1, 2)])
def test_a_tensor_that_is_not_right_is_named_before_any_is_read(
    mine: Path, name: str, fault: str, why: str, own: Shard
) -> None:
    tensors, name = load_file(mine / "model.safetensors"), FIRST + name
    given = tensors.pop(name)
    if fault != "missing":
        while fault == "shape" and given.dim() > max(1, tensors_dim(name)):
            given = given[..., 0]
        tensors[name] = given.float().contiguous() if fault == "dtype" else given.contiguous()
    save_file(tensors, mine / "model.safetensors")
    heard: list[tuple[int, int]] = []
    with pytest.raises(ModelInvalid, match=re.escape(f"tensor {name} {why}")):
        loaded(mine, own, heard=heard)
    assert not heard


@pytest.mark.parametrize(
    ("scale", "error", "why"),
    [
        (129, ModelUnsupported, r"has a scale of 2\^2, this device's kernels take up to 2\^1"),
        (255, ModelInvalid, "has a NaN, expected powers of two"),
    ],
)
def test_a_scale_that_is_none_or_that_kernels_do_not_take_is_named(
    mine: Path, scale: int, error: type[Exception], why: str
) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(mine / "model.safetensors")
    tensors[name][2, 5, 1] = scale
    save_file(tensors, mine / "model.safetensors")
    kernels = TorchKernels()
    kernels.experts.largest_scale = 128  # a GPU's
    with pytest.raises(error, match=f"tensor {name} {why}"):
        load_weights(Dequantised(SafetensorsSource(mine), None), read_config(mine), kernels)


def tensors_dim(name: str) -> int:
    """Of one that has lost its last dimensions."""
    return 1 if name.endswith("_bias") else 2


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        (
            {"quantization_config": CONFIG | {"modules_to_not_convert": ["model.layers.1.mlp"]}},
            ModelUnsupported,
            "quantization_config.modules_to_not_convert ['model.layers.1.mlp'] is not supported: "
            "model.layers.1.mlp names experts",
        ),
        (
            {"quantization_config": CONFIG | {"modules_to_not_convert": ["lm_head", "experts"]}},
            ModelUnsupported,
            "experts names experts, which are served all in MXFP4 or none",
        ),
        (
            {
                "quantization_config": CONFIG
                | {"modules_to_not_convert": ["model.layers.0.mlp.experts.down_proj"]}
            },
            ModelUnsupported,
            "model.layers.0.mlp.experts.down_proj names experts",
        ),
        (
            {"quantization_config": CONFIG | {"modules_to_not_convert": ["model.*.mlp.*"]}},
            ModelUnsupported,
            "model.*.mlp.* names experts",
        ),
        (
            {"quantization_config": CONFIG | {"modules_to_not_convert": "lm_head"}},
            ModelInvalid,
            "quantization_config.modules_to_not_convert: expected a list of names",
        ),
        (
            {"quantization_config": CONFIG | {"block": 16}},
            ModelUnsupported,
            "quantization_config.block 16 is not supported",
        ),
        (
            {"quantization_config": CONFIGS["block"]},
            ModelUnsupported,
            "quantization_config.quant_method 'fp8' is not supported, 'mxfp4' is",
        ),
        ({"intermediate_size": 80}, ModelInvalid, "intermediate_size: expected a multiple of 32"),
        ({"hidden_size": 72}, ModelInvalid, "hidden_size: expected a multiple of 32"),
    ],
)
def test_what_is_not_served_of_it_is_refused_by_name(
    mine: Path, fields: dict[str, Any], error: type[Exception], why: str
) -> None:
    change(mine, **fields)
    with pytest.raises(error, match=re.escape(why)):
        read_config(mine)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_no_other_model_has_it(
    family: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((make_model(family) / "config.json").read_bytes())
    change(tmp_path, quantization_config=CONFIG)
    with pytest.raises(
        ModelUnsupported, match="quant_method 'mxfp4' is not supported: gpt-oss alone"
    ):
        read_config(tmp_path)


def test_a_list_of_exceptions_and_how_others_run_it_change_nothing(mine: Path) -> None:
    without = read_config(mine)
    change(mine, quantization_config={"quant_method": "mxfp4", "dequantize": True})
    assert read_config(mine) == without


def test_ranks_have_whole_blocks_of_an_expert(mine: Path) -> None:
    assert MXFP4_BLOCK == mxfp4.BLOCK
    config = read_config(mine)
    for count in (1, 2):
        shard.check(config, count)
    why = "an MLP of width 64 in 2 blocks of 32 (MXFP4) and .*; gpus can be 1 or 2$"
    with pytest.raises(ModelUnsupported, match=re.escape(why).replace(r"\.\*", ".*")[:-2] + "$"):
        shard.check(config, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_experts_are_as_wide_as_other_weights(mine: Path, ranks: int) -> None:
    """A rank's are slices of the model's."""
    config = read_config(mine)
    (mine / "model.safetensors").unlink()
    whole = load_weights(RandomSource(), config, TorchKernels())
    for rank in range(ranks):
        own = Shard(rank, ranks)
        made = load_weights(RandomSource(), config, TorchKernels(), shard=own)
        assert checked(RandomSource(), config, own).counts == made.counts
        for one, other in zip(made.layers, whole.layers, strict=True):
            assert isinstance(one.blocks[0], Experts) and isinstance(other.blocks[0], Experts)
            down, columns = plain_of(one.blocks[0].layer.down), own.of(64)
            theirs = plain_of(other.blocks[0].layer.down)[:, columns.start : columns.stop]
            assert torch.equal(down, theirs)
            assert 0.015 < float(down.std()) < 0.025


def test_the_report_has_experts_in_4_bits_and_their_scales(both: tuple[Path, Path]) -> None:
    small, plain = (loaded(folder) for folder in both)
    parts = {part.name: part for part in small.parts()}
    layers, numbers, biases = 4, 4 * 3 * 64 * 64, 4 * 3 * 64
    assert parts[memory.EXPERTS].fixed == layers * (numbers // 2 + 4 * biases)
    assert parts[memory.EXPERTS].detail == "in 4 bits (MXFP4)"
    assert parts[memory.SCALES].fixed == layers * numbers // 32
    assert sum(part.fixed for part in parts.values()) == small.nbytes(torch.float32)
    others = {part.name: part for part in plain.parts()}
    assert others[memory.EXPERTS].fixed == layers * 4 * (numbers + biases)
    assert others[memory.EXPERTS].detail is None and memory.SCALES not in others
    assert others[memory.WEIGHTS] == parts[memory.WEIGHTS]


def test_an_expert_without_rows_is_not_dequantised(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a step of one token reads two of four experts."""
    made = decoder(both[0])
    counted: list[int] = []
    original = Mxfp4Weight.dequantised

    def counting(self: Mxfp4Weight, *dtype: torch.dtype) -> torch.Tensor:
        counted.append(len(self))
        return original(self, *dtype)

    monkeypatch.setattr(Mxfp4Weight, "dequantised", counting)
    first = made.experts()[0]
    x, logits = torch.randn(1, 64), torch.randn(1, 4)
    made.kernels.experts.run(x, logits, first.layer, first.routing, Given(1))
    assert counted == [128, 64] * 2


def test_experts_that_are_dequantised_in_parts_answer_as_those_at_once(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts that do not divide the outputs, of 5 rows for each of 64 columns."""
    packed, plain = (decoder(folder).experts()[0] for folder in both)
    x, logits = torch.randn(50, 64), torch.randn(50, 4)
    kernels = TorchKernels()
    want = kernels.experts.run(x, logits, plain.layer, plain.routing, Given(50))
    monkeypatch.setattr("kvline_server.kernels.torch_experts.AT_ONCE", 64 * 5 + 3)
    got = kernels.experts.run(x, logits, packed.layer, packed.routing, Given(50))
    assert torch.allclose(got, want, atol=1e-4)


def test_every_byte_stands_for_the_numbers_that_it_was_packed_from() -> None:
    torch.manual_seed(1)
    blocks, scales, want = packed(torch.randn(960, 64) * torch.logspace(-9, 9, 960).unsqueeze(1))
    assert len(set(blocks.flatten().tolist())) == 256
    assert torch.equal(Mxfp4Weight(blocks.flatten(1), scales).dequantised(), want)
