"""fp8 checkpoints of both formats: the weights that they stand for, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine, finish, greedy
from engines import plain as plain_of
from fp8_checkpoints import (
    CONFIGS,
    GROUP,
    Keeping,
    Plain,
    change,
    checkpoints,
    loaded,
)
from safetensors.torch import load_file, save_file

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.config import read_config
from kvline_server.model.fields import UNKNOWN
from kvline_server.model.quantization import SERVED
from kvline_server.model.shard import WHOLE, Shard

CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "minmax",
}
FIRST = "model.layers.0.mlp.down_proj.weight"
SCALES = {"channel": FIRST + "_scale", "block": FIRST + "_scale_inv"}


@pytest.fixture(params=list(CONFIGS))
def both(
    request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path: Path
) -> tuple[str, Path, Path]:
    """The format, a folder of it, and one of the weights that it stands for."""
    return request.param, *checkpoints(request.param, make_model("wide"), tmp_path)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_weights_are_those_that_fp8_and_scales_stand_for(
    both: tuple[str, Path, Path], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a rank's rows and columns, and in copies that begin within a block."""
    monkeypatch.setattr("kvline_server.model.loader.COPY_BYTES", 100_000)
    _, small, plain = both
    for one, other in zip(loaded(small, shard).layers, loaded(plain, shard).layers, strict=True):
        for a, b in (
            (one.mixer.projections[0], other.mixer.projections[0]),
            *zip(one.blocks[0].projections, other.blocks[0].projections, strict=True),
        ):
            assert torch.equal(plain_of(a), plain_of(b))


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize(
    "family",
    ["wide", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3", "qwen3-moe", "mixtral"],
)
def test_an_fp8_checkpoint_answers_as_its_dequantised_weights(
    family: str, kind: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    answers = []
    for folder in checkpoints(kind, make_model(family), tmp_path):
        made = engine(folder)
        made.submit(0, list(range(20, 95)), greedy(8, prompt_logprobs=2))
        (outputs,) = finish(made).values()
        assert outputs[0].prompt_scores is not None
        answers.append(
            (
                [token for o in outputs for token in o.tokens],
                outputs[0].prompt_scores.values.tolist(),
            )
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kernels", [Plain(), Keeping()], ids=["dequantised", "kept"])
@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_scales_that_are_not_right_are_named(
    both: tuple[str, Path, Path], fault: str, kernels: TorchKernels
) -> None:
    kind, folder, _ = both
    tensors = load_file(folder / "model.safetensors")
    name = SCALES[kind]
    if fault == "missing":
        del tensors[name]
        why = f"tensor {name} is in no safetensors file"
    elif fault == "shape":
        tensors[name] = torch.ones(3, 1)
        wanted = {"channel": [512, 1], "block": [4, 8]}[kind]
        why = f"tensor {name} has shape [3, 1], config.json requires {wanted}"
    else:
        change(folder, None)
        why = "is fp8, and config.json has no quantization_config"
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelInvalid, match=re.escape(why)):
        loaded(folder, kernels=kernels)


def test_a_scheme_of_an_fp8_cache_changes_no_weight(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(make_model("llama") / "config.json", tmp_path)
    change(tmp_path, CONFIGS["channel"])
    without = read_config(tmp_path)
    change(tmp_path, CONFIGS["channel"] | {"kv_cache_scheme": CACHE})
    assert read_config(tmp_path) == without


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        ("block", {"quant_method": "awq"}, "quantization_config.quant_method 'awq'"),
        ("block", {"quant_method": "gptq"}, "quantization_config.quant_method 'gptq'"),
        ("block", {"quant_method": "gguf"}, "quantization_config.quant_method 'gguf'"),
        ("block", {"quant_method": None}, "quantization_config.quant_method None"),
        ("block", {"weight_block_size": None}, "quantization_config.weight_block_size None"),
        ("block", {"activation_scheme": "static"}, "activation_scheme 'static'"),
        ("channel", {"format": "nvfp4-pack-quantized"}, "quantization_config.format 'nvfp4"),
        ("block", {"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt 'ue8m0'"),
        ("block", {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2'"),
        (
            "block",
            {"quant_method": None, "quant_algo": "NVFP4"},
            "quantization_config.quant_algo 'NVFP4'",
        ),
        (
            "channel",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "quantization_config.sparsity_config.format 'sparse-24-bitmask'",
        ),
        (
            "channel",
            {"transform_config": {"config_groups": {"r1": {}}}},
            "quantization_config.transform_config {",
        ),
        (
            "channel",
            {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"symmetric": False}}}},
            "quantization_config.config_groups.g.weights.symmetric False",
        ),
        (
            "channel",
            {"config_groups": {"g": GROUP | {"output_activations": {"num_bits": 8}}}},
            "quantization_config.config_groups.g.output_activations {",
        ),
        (
            "channel",
            {"kv_cache_scheme": CACHE | {"num_bits": 4}},
            "quantization_config.kv_cache_scheme.num_bits 4",
        ),
        (
            "channel",
            {"kv_cache_scheme": CACHE | {"type": "int"}},
            "quantization_config.kv_cache_scheme.type 'int'",
        ),
        (
            "channel",
            {"kv_cache_scheme": CACHE | {"strategy": "attn_head"}},
            "quantization_config.kv_cache_scheme.strategy 'attn_head'",
        ),
        (
            "channel",
            {"kv_cache_scheme": CACHE | {"dynamic": True}},
            "quantization_config.kv_cache_scheme.dynamic True",
        ),
        (
            "channel",
            {"kv_cache_scheme": {"num_bits": 8}},
            "quantization_config.kv_cache_scheme.type None",
        ),
        (
            "channel",
            {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | {"num_bits": 4}}}},
            "quantization_config.config_groups.group_0.weights.num_bits 4",
        ),
        (
            "channel",
            {"config_groups": {"g": GROUP | {"weights": GROUP["weights"] | {"strategy": "group"}}}},
            "quantization_config.config_groups.g.weights.strategy 'group'",
        ),
    ],
)
def test_other_formats_are_refused_by_name(
    kind: str, changed: dict[str, Any], named: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(make_model("llama") / "config.json", tmp_path)
    change(tmp_path, CONFIGS[kind] | changed)
    with pytest.raises(ModelUnsupported, match=re.escape(named)) as caught:
        read_config(tmp_path)
    rest = str(caught.value).partition(" is not supported")[2]
    assert rest in (SERVED, UNKNOWN) or re.fullmatch(", '?[A-Za-z0-9]+'? is", rest)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "MIXED_PRECISION"])
def test_quantisation_in_a_file_of_its_own_is_refused_by_name(
    algorithm: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Else random weights would be sized, and served, as unquantised ones."""
    shutil.copy(make_model("llama") / "config.json", tmp_path)
    beside = tmp_path / "hf_quant_config.json"
    quantised = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["a"]}
    beside.write_text(json.dumps({"producer": {"name": "b"}, "quantization": quantised}))
    named = f"hf_quant_config.json: quantization.quant_algo '{algorithm}' is not supported{SERVED}"
    with pytest.raises(ModelUnsupported, match=re.escape(named)):
        read_config(tmp_path)


def test_a_quantised_cache_alone_changes_no_weight(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(make_model("llama") / "config.json", tmp_path)
    plain = read_config(tmp_path)
    beside = tmp_path / "hf_quant_config.json"
    cache = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"quantization": cache}))
    assert read_config(tmp_path) == plain
    change(tmp_path, CONFIGS["block"])  # which says more than the file beside it
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8_BLOCK_SCALES"}}))
    assert read_config(tmp_path).quantization is not None
    change(tmp_path, None)
    beside.write_text("{}")
    with pytest.raises(ModelInvalid, match=r"hf_quant_config\.json: quantization"):
        read_config(tmp_path)
