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
from safetensors.torch import load_file, save_file

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.config import read_config
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.loader import SafetensorsSource, Weights, load_weights
from kvline_server.model.shard import WHOLE, Shard

LARGEST = 448.0  # of e4m3
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "observer": "minmax",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": GROUP},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    },
    "block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}
FIRST = "model.layers.0.mlp.down_proj.weight"
SCALES = {"channel": FIRST + "_scale", "block": FIRST + "_scale_inv"}


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> fp8, scales, what both stand for"""
    if kind == "channel":
        scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        whole = scales
    else:
        rows, columns = ((n + 127) // 128 for n in weight.shape)
        scales = torch.zeros(rows, columns)
        for i in range(rows):
            for j in range(columns):
                block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                scales[i, j] = block.abs().max() / LARGEST
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        whole = whole[: len(weight), : weight.shape[1]]
    numbers = (weight / whole).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * whole


@pytest.fixture(params=list(CONFIGS))
def both(
    request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path: Path
) -> tuple[str, Path, Path]:
    """The format, a folder of it, and one of the weights that it stands for."""
    kind = request.param
    source = make_model("wide")
    folders = tmp_path / "fp8", tmp_path / "plain"
    tensors = load_file(source / "model.safetensors")
    small, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            small[name], scales, plain[name] = quantised(weight, kind)
            suffix = "_scale" if kind == "channel" else "_scale_inv"
            small[name + suffix] = scales
    for folder, made in zip(folders, (small, plain), strict=True):
        shutil.copytree(source, folder)
        save_file(made, folder / "model.safetensors")
    change(folders[0], CONFIGS[kind])
    return kind, *folders


def change(folder: Path, quantization: dict[str, Any] | None) -> None:
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )


def loaded(folder: Path, shard: Shard = WHOLE) -> Weights:
    config = read_config(folder)
    source = Dequantised(SafetensorsSource(folder), config.quantization)
    kernels = TorchKernels()
    kernels.pack = lambda weight: weight  # type: ignore[method-assign]
    return load_weights(source, config, kernels, shard=shard)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_weights_are_those_that_fp8_and_scales_stand_for(
    both: tuple[str, Path, Path], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a rank's rows and columns, and in copies that begin within a block."""
    monkeypatch.setattr("kvline_server.model.loader.COPY_BYTES", 100_000)
    _, small, plain = both
    for one, other in zip(loaded(small, shard).layers, loaded(plain, shard).layers, strict=True):
        for a, b in (
            (one.attention.qkv, other.attention.qkv),
            *zip(one.mlp.linears, other.mlp.linears, strict=True),
        ):
            assert torch.equal(a.weight, b.weight)


def test_an_fp8_checkpoint_answers_as_its_dequantised_weights(
    both: tuple[str, Path, Path],
) -> None:
    answers = []
    for folder in both[1:]:
        made = engine(folder)
        made.submit(0, list(range(20, 95)), greedy(8, prompt_logprobs=2))
        (outputs,) = finish(made).values()
        assert outputs[0].prompt_scores is not None
        answers.append(([o.token for o in outputs], outputs[0].prompt_scores.values.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_scales_that_are_not_right_are_named(both: tuple[str, Path, Path], fault: str) -> None:
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
        loaded(folder)


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
    assert "is" in str(caught.value).partition(" is not supported")[2]
