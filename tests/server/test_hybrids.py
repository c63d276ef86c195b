"""Hybrids, whose memory is not only a KV cache, as whole models: what transformers computes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import decoder
from fp8_checkpoints import checkpoints
from hybrid_models import FULL, HYBRIDS, LINEAR, Runner, Work, build, logits_of, on_two_ranks, save
from safetensors.torch import load_file, save_file

from kvline_contract.launch import Device
from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.group import Group
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.state_shape import States
from kvline_server.model import devices
from kvline_server.model.config import ModelConfig, read_config
from kvline_server.model.decoder import Decoder, cache_groups, state_shapes
from kvline_server.model.hybrid import DeltaRule, Mamba2
from kvline_server.model.loader import (
    RandomSource,
    SafetensorsSource,
    checked,
    left_out,
    load_weights,
)
from kvline_server.model.positions import Rope
from kvline_server.model.sequence import Kind
from kvline_server.model.shard import Shard, check, local

LENGTHS = (1, 3, 4, 63, 64, 65, 130)  # around the convolution and the chunks
CUTS = [(1,), (63, 64), (64, 65, 68), (3, 7, 70, 129), (16, 17, 18, 19, 20)]
NEAR = 1e-4
OUTPUT = 64  # greedy tokens


@dataclass
class Family:
    name: str
    model: torch.nn.Module
    folder: Path


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @functools.cache
    def made(name: str) -> Family:
        model = build(name)
        return Family(name, model, save(model, tmp_path_factory.mktemp("hybrid")))

    return made


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    return family_of(request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    made = torch.Generator().manual_seed(length + 1000 * seed)
    return torch.randint(0, 250, (length,), generator=made).tolist()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=NEAR * max(1.0, float(want.abs().max())))


def test_prompts_together_are_what_each_is_in_transformers(family: Family) -> None:
    runner, prompts = Runner(decoder(family.folder)), [prompt(n) for n in LENGTHS]
    got = runner.run([Work(i, each) for i, each in enumerate(prompts)])
    for one, tokens in zip(got, prompts, strict=True):
        near(one, logits_of(family.model, tokens))


@pytest.mark.parametrize("cuts", CUTS)
def test_a_prompt_in_chunks_is_what_it_is_whole(family: Family, cuts: Sequence[int]) -> None:
    """Beside a sequence that is decoded meanwhile."""
    runner, tokens, other = Runner(decoder(family.folder)), prompt(130), prompt(80, 1)
    made: list[torch.Tensor] = []
    beside = runner.run([Work(1, other[:70])])
    for at, (start, end) in enumerate(zip((0, *cuts), (*cuts, 130), strict=True)):
        work = [Work(1, [other[70 + at]]), Work(0, tokens[start:end])]
        if start and end - start == 1:
            work.reverse()
        for item, rows in zip(work, runner.run(work), strict=True):
            (beside if item.sequence else made).append(rows)
    near(torch.cat(made), logits_of(family.model, tokens))
    near(torch.cat(beside), logits_of(family.model, other[: 71 + len(cuts)]))


def test_greedy_tokens_are_those_of_transformers(family: Family) -> None:
    """Which has them all at once: each is the best behind those before it."""
    runner, prompts = Runner(decoder(family.folder)), [prompt(n, 2) for n in (1, 40, 66)]
    rows = runner.run([Work(i, each) for i, each in enumerate(prompts)])
    made = [[int(each[-1].argmax())] for each in rows]
    for _ in range(OUTPUT - 1):
        rows = runner.run([Work(i, [each[-1]]) for i, each in enumerate(made)])
        for each, logits in zip(made, rows, strict=True):
            each.append(int(logits[-1].argmax()))
    for tokens, output in zip(prompts, made, strict=True):
        want = logits_of(family.model, tokens + output)[len(tokens) - 1 : -1]
        chosen = want.gather(1, torch.tensor(output).unsqueeze(1))
        assert float((want.amax(1) - chosen.squeeze(1)).max()) < NEAR  # ties are rare
        assert len(set(output)) > 8 and (want.argmax(1) == torch.tensor(output)).sum() > OUTPUT - 4


def test_two_ranks_are_as_one(family: Family) -> None:
    """Each has a part of the vocabulary."""
    config, tokens = read_config(family.folder), prompt(70, 3)

    def one(group: Group) -> torch.Tensor:
        shard, kernels = Shard(group.rank, 2), TorchKernels(group=group)
        source = SafetensorsSource(family.folder)
        weights = load_weights(source, config, kernels, shard=shard)
        runner = Runner(Decoder(local(config, shard), weights, 256, kernels))
        made = [
            runner.run([Work(2, some)])[0] for some in (tokens[:66], tokens[66:69], [tokens[69]])
        ]
        return torch.cat(made)

    near(torch.cat(on_two_ranks(one), dim=1), logits_of(family.model, tokens))


def test_a_state_that_is_lost_shows(family: Family) -> None:
    """Else none of this would say that states are kept."""
    runner, tokens = Runner(decoder(family.folder)), prompt(96, 4)
    runner.run([Work(0, tokens[:64])])
    for memory in runner.memories:
        if isinstance(memory, States):
            memory.matrices[1].zero_()
    (got,) = runner.run([Work(0, tokens[64:])])
    assert float((got[-1] - logits_of(family.model, tokens)[-1]).abs().max()) > 100 * NEAR


def test_every_parameter_is_counted(family: Family) -> None:
    source = SafetensorsSource(family.folder)
    weights = checked(source, decoder(family.folder).config)
    elements = sum(each.numel() for each in family.model.state_dict().values())
    assert weights.counts.total() == elements
    sizes = sum(part.fixed for part in decoder(family.folder).weights.parts())
    assert sizes == 4 * elements and not weights.scales
    kernels = TorchKernels(torch.bfloat16)
    halves = load_weights(source, read_config(family.folder), kernels)
    assert sum(part.fixed for part in halves.parts()) == halves.nbytes(torch.bfloat16)
    decays = halves.counts[torch.float32]
    assert halves.nbytes(torch.bfloat16) == 2 * elements + 2 * decays
    assert decays > 0


def together(tensors: dict[str, torch.Tensor], at: str) -> dict[str, torch.Tensor]:
    """The experts of a layer as published files have them, in two tensors; takes those of each."""
    count = sum(name.startswith(at) for name in tensors) // 3
    gates, ups, downs = (
        [tensors.pop(f"{at}{expert}.{name}_proj.weight") for expert in range(count)]
        for name in ("gate", "up", "down")
    )
    both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    return {at + "gate_up_proj": torch.stack(both), at + "down_proj": torch.stack(downs)}


@pytest.mark.parametrize(("name", "kind"), [("qwen3.5-moe", "block"), ("qwen3-next", "channel")])
def test_fp8_weights_are_what_they_stand_for(
    name: str, kind: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """In whatever order their rows are taken; what the files have unquantised stays so."""
    both = checkpoints(kind, family_of(name).folder, tmp_path)
    small, plain = (Runner(decoder(folder)).run([Work(0, prompt(70))])[0] for folder in both)
    assert torch.equal(small, plain)


def test_sizes_of_published_models_are_those_of_their_files() -> None:
    """Parameters, and bytes of a sequence's states in bfloat16 with matrices in float32."""
    rule = DeltaRule(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
    kinds = (*((Kind.RECURRENT, Kind.MLP),) * 3, (Kind.ATTENTION, Kind.MLP)) * 16
    qwen_27b = ModelConfig(
        architecture="",
        layers=64,
        hidden=5120,
        intermediate=17408,
        heads=24,
        kv_heads=4,
        head_dim=256,
        vocabulary=248320,
        max_position=262144,
        norm_eps=1e-6,
        rope=Rope(1e7, rotary_dim=64),
        kinds=kinds,
        recurrent=rule,
        qk_norm="head",
        output_gate=True,
    )
    assert checked(RandomSource(), qwen_27b).counts.total() == 26_895_998_464
    states = state_shapes(qwen_27b)
    assert sum(one.nbytes(torch.bfloat16, torch.float32) for one in states) == 153_944_064
    (group,) = cache_groups(qwen_27b, 4096, torch.bfloat16)
    assert group.layers == tuple(range(3, 64, 4)) and group.shape.bytes_per_token == 65_536
    share = state_shapes(local(qwen_27b, Shard(3, 4)))
    assert sum(one.nbytes(torch.bfloat16, torch.float32) for one in share) * 4 == 153_944_064


def towered(folder: Path, into: Path) -> Path:
    """The text model of a checkpoint that has a tower for images, and a draft head."""
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        tensors |= together(tensors, name.partition("0.gate_proj")[0])
    more = ("model.visual.blocks.0.norm1.weight", "mtp.norm.weight", "mtp.fc.weight")
    save_file(tensors | {name: torch.zeros(1) for name in more}, into / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (name,) = text.pop("architectures")
    made = {
        "architectures": [name.replace("CausalLM", "ConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
        "image_token_id": 3,
        "tie_word_embeddings": False,
    }
    (into / "config.json").write_text(json.dumps(made))
    return into


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_text_model_beside_a_tower_is_served(
    name: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    made = family_of(name)
    folder, tokens = towered(made.folder, tmp_path), prompt(9)
    (got,) = Runner(decoder(folder)).run([Work(0, tokens)])
    near(got, logits_of(made.model, tokens))
    warning = left_out(SafetensorsSource(folder), read_config(folder))
    assert warning.startswith("1 tensors model.visual.* and 2 tensors mtp.* are not loaded")
    alone = folder / "alone"
    alone.mkdir()
    os.link(folder / "model.safetensors", alone / "model.safetensors")
    shutil.copy(made.folder / "config.json", alone)
    (again,) = Runner(decoder(alone)).run([Work(0, tokens)])  # by the other names
    assert torch.equal(again, got)


def test_on_a_gpu_heads_of_other_sizes_are_refused_before_weights_are_read(
    family_of: Callable[[str], Family],
) -> None:
    config = read_config(family_of("qwen3.5").folder)
    scan = read_config(family_of("nemotron-h").folder)
    assert isinstance(config.recurrent, DeltaRule) and isinstance(scan.recurrent, Mamba2)
    rule = replace(config.recurrent, key_dim=128, value_dim=128)
    heads = replace(scan.recurrent, head_dim=64, state_dim=128)
    for small, large, sizes in (
        (config, rule, "not of size 128"),
        (scan, heads, "not of 64 with states of 128"),
    ):
        devices.check(small, Device.CPU)
        with pytest.raises(ModelUnsupported, match=f"{sizes}, which are served on CPUs only"):
            devices.check(small, Device.CUDA)
        devices.check(replace(small, recurrent=large), Device.CUDA)
        with pytest.raises(ModelUnsupported, match="not of width 4"):
            devices.check(replace(small, recurrent=replace(large, width=3)), Device.CUDA)
    devices.check(replace(config, recurrent=None), Device.CUDA)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "nemotron-h", "nemotron-h-latent"])
def test_a_rank_s_model_has_its_columns_of_experts(
    name: str, family_of: Callable[[str], Family]
) -> None:
    """By which kernels are chosen: those of both have multiples of 16."""
    config = read_config(family_of(name).folder)
    assert config.expert_width == 24 and local(config, Shard(1, 2)).expert_width == 12


def test_ranks_that_heads_do_not_divide_are_refused_by_name(
    family_of: Callable[[str], Family],
) -> None:
    config = read_config(family_of("qwen3.5").folder)
    check(config, 2)
    with pytest.raises(ModelUnsupported, match=r"layers with 2 key heads .* gpus can be 1 or 2$"):
        check(config, 3)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("qwen3.5", {"layer_types": [LINEAR] * 4}, "layer_types .* without a layer of attention"),
        ("qwen3.5", {"layer_types": ["mlp"] * 4}, "layer_types: expected linear_attention, full"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate False .*, True is"),
        (
            "qwen3-next",
            {"mlp_only_layers": [1]},
            r"mlp_only_layers \[1\] .* in every layer",
        ),
        ("nemotron-h", {"layers_block_type": [LINEAR, "moe"]}, "without a layer of attention"),
        (
            "nemotron-h",
            {"layers_block_type": ["moe", "lstm"]},
            "layers_block_type: expected layers",
        ),
        ("nemotron-h", {"n_group": 2}, "n_group 2 .*, 1 is"),
        ("nemotron-h", {"auto_map": {"AutoModelForCausalLM": "a.B"}}, "auto_map"),
        ("nemotron-h-latent", {"mlp_bias": True}, "mlp_bias True .* beside moe_latent_size"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ("granite", {"residual_multiplier": None}, "residual_multiplier: expected a positive"),
    ],
)
def test_what_is_not_served_is_named(
    name: str,
    change: dict[str, Any],
    why: str,
    family_of: Callable[[str], Family],
    tmp_path: Path,
) -> None:
    raw = json.loads((family_of(name).folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises((ModelInvalid, ModelUnsupported), match=why):
        read_config(tmp_path)


def test_a_pattern_of_letters_is_a_list_of_blocks(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """As published files have it; their number of layers may be another."""
    folder = family_of("nemotron-h").folder
    raw = json.loads((folder / "config.json").read_text())
    assert raw.pop("layers_block_type") == [LINEAR, "mlp", LINEAR, FULL, "moe", LINEAR, "moe"]
    made = raw | {"hybrid_override_pattern": "M-M*EME", "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(made))
    assert read_config(tmp_path) == read_config(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text_config": None}, "text_config: expected an object"),
        ({"tie_word_embeddings": True}, "text_config.tie_word_embeddings False .* beside"),
        ({"model_type": "qwen2_vl"}, "model_type 'qwen2_vl' .*, 'qwen3_5' is"),
        ({"num_experts": 3}, "num_experts 3 is not supported: this server does not know it"),
    ],
)
def test_a_file_beside_a_tower_is_read_whole(
    change: dict[str, Any], why: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    folder = towered(family_of("qwen3.5").folder, tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises((ModelInvalid, ModelUnsupported), match=why):
        read_config(folder)
