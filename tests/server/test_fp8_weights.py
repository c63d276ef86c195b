"""fp8 weights that stay in fp8: loaded, fused and cut, random, counted, and what a start says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine, finish, greedy
from engines import plain as plain_of
from fp8_checkpoints import (
    CONFIGS,
    Keeping,
    Plain,
    change,
    checkpoints,
    dequantised,
    loaded,
    projections,
    quantised,
)
from safetensors.torch import save_file
from servers import launch_config

from kvline_contract import memory
from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_server.errors import OutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.kernels.fp8 import FP8, Fp8Weight
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.config import read_config
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.linear import Rows, Tensors, projection
from kvline_server.model.loader import (
    Loading,
    RandomSource,
    SafetensorsSource,
    checked,
    load_weights,
)
from kvline_server.model.quantization import Quantization
from kvline_server.model.shard import WHOLE, Shard
from kvline_server.sizing import load
from kvline_server.sizing.settings import resolve
from kvline_server.worker.backend import open_backend


@pytest.fixture(params=list(CONFIGS))
def both(
    request: pytest.FixtureRequest, make_model: Callable[..., Path], tmp_path: Path
) -> tuple[str, Path, Path]:
    """The format, a folder of it, and one of the weights that it stands for."""
    return request.param, *checkpoints(request.param, make_model("wide"), tmp_path)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)])
def test_weights_that_stay_in_fp8_are_those_of_the_file(
    both: tuple[str, Path, Path], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and scales of parts of several tensors, of a rank's rows and columns, in copies that
    begin within a block."""
    monkeypatch.setattr("kvline_server.model.loader.COPY_BYTES", 100_000)
    kind, small, plain = both
    heard: list[tuple[int, int]] = []
    made, whole = loaded(small, shard, Keeping(), heard), loaded(plain, shard)
    kept = [a.weight for a in projections(made) if isinstance(a.weight, Fp8Weight)]
    # Heads are 64 wide in all: of blocks, q ends within one, and so do columns of one of two ranks.
    assert len(kept) == (8 if kind == "channel" else 6 if shard is WHOLE else 4)
    for one, other in zip(projections(made), projections(whole), strict=True):
        assert torch.equal(dequantised(one), plain_of(other))
    nbytes = made.nbytes(torch.float32)
    assert heard[-1] == (nbytes, nbytes)
    values = sum(weight.shape.numel() for weight in kept)
    scales = sum(weight.scales.numel() for weight in kept)
    assert (made.counts[FP8], made.counts[torch.float32]) == (values, scales)
    parts = {part.name: part.fixed for part in made.parts()}
    assert parts == {memory.WEIGHTS: nbytes - 4 * scales, memory.SCALES: 4 * scales}
    assert nbytes == whole.nbytes(torch.float32) - 3 * values + 4 * scales
    config = read_config(small)
    source = Dequantised(SafetensorsSource(small), config.quantization)
    assert checked(source, config, shard, Keeping()).counts == made.counts


Q, K, V = Rows("q", range(256), 256), Rows("k", range(128), 128), Rows("v", range(192), 192)


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize(
    ("parts", "own", "cut"),
    [
        ([Q, K, V], None, False),  # the last may end within a block
        ([Q, V, K], None, True),
        ([Rows("q", range(128, 256), 256), Rows("v", range(128), 192)], None, False),
        ([Rows("q", range(128), 256), Rows("v", range(96), 192)], None, True),
        ([Rows("q", range(128), 256), Rows("v", range(128, 192), 192)], None, True),
        ([Rows("v", range(64, 192), 192)], None, True),
        ([Q], range(256, 384), False),
        ([V], range(192, 384), True),
        ([V], range(192), True),  # as on the other rank, though it begins with a block
    ],
)
def test_scales_are_fused_and_cut_as_the_weights_are(
    kind: str, parts: list[Rows], own: range | None, cut: bool, tmp_path: Path
) -> None:
    """What ends within a block is dequantised, on each of the ranks, and named."""
    torch.manual_seed(0)
    how = Quantization(*(("_scale", None) if kind == "channel" else ("_scale_inv", (128, 128))))
    tensors: dict[str, torch.Tensor] = {}
    whole, columns = {}, 384
    for part in (Q, K, V):
        values, scales, _ = quantised(torch.randn(part.of, columns), kind)
        few = scales.bfloat16()  # as files have them
        tensors |= {f"{part.name}.weight": values, f"{part.name}.weight{how.suffix}": few}
        whole[part.name] = Fp8Weight(values, few.float(), kind == "block").dequantised()
    save_file(tensors, tmp_path / "model.safetensors")
    source = Dequantised(SafetensorsSource(tmp_path), how)
    projection(Tensors(source, WHOLE, Keeping()), parts, columns, own=own)  # checks
    loading = Loading(source, Keeping(), 1, lambda *at: None, WHOLE)
    made = projection(loading, parts, columns, own=own)
    assert isinstance(made.weight, Fp8Weight) == (kind == "channel" or not cut)
    across = own or range(columns)
    want = [whole[p.name][p.rows.start : p.rows.stop, across.start : across.stop] for p in parts]
    torch.testing.assert_close(dequantised(made), torch.cat(want))


def test_fp8_that_is_kept_answers_nearly_as_dequantised_weights_do(
    both: tuple[str, Path, Path],
) -> None:
    """Only inputs are rounded, each number by a sixteenth of itself at most."""
    found = []
    for kernels in (Plain(), Keeping()):
        made = engine(both[1], kernels=kernels)
        made.submit(0, list(range(20, 95)), greedy(1, prompt_logprobs=2))
        (outputs,) = finish(made).values()
        assert outputs[0].prompt_scores is not None
        found.append(torch.tensor(outputs[0].prompt_scores.values))
    distance = float((found[0] - found[1]).abs().mean())
    assert 0 < distance < 0.01, distance


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_random_weights_stay_in_fp8_too_near_those_without(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    """A rank's are slices of the model's; the embedding and the LM head are plain ones."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 160, "rms_norm_eps": 1e-5}
    shape |= {"max_position_embeddings": 512, "num_hidden_layers": 1, "hidden_act": "silu"}
    given = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    (tmp_path / "config.json").write_text(json.dumps(given))
    change(tmp_path, CONFIGS[kind])
    config = read_config(tmp_path)
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        source = RandomSource(config.quantization)
        made = load_weights(source, config, Keeping(torch.bfloat16), shard=shard)
        plain = load_weights(RandomSource(), config, Plain(torch.bfloat16), shard=shard)
        assert made.counts[FP8] == sum(a.weight.shape.numel() for a in projections(plain))
        assert torch.equal(made.embedding, plain.embedding) and torch.equal(made.head, plain.head)
        for one, other in zip(projections(made), projections(plain), strict=True):
            assert isinstance(one.weight, Fp8Weight) and isinstance(other.weight, torch.Tensor)
            want = other.weight.float()
            assert float((dequantised(one) - want).norm() / want.norm()) < 0.03


def started(folder: Path, kernels: TorchKernels, memory: int = 8 << 30) -> list[Progress]:
    """What a start says while it loads."""
    launch = launch_config(folder, EngineOptions(256, 2, 64), CapacityOptions(kv_tokens=1024))
    model = load.read_model(launch)
    heard: list[Progress] = []
    backend = open_backend(launch, memory, os.getpid(), lambda text: None)
    backend = replace(backend, kernels=lambda *_: kernels, note="")
    settings = resolve(launch, model, backend.device.limit)
    load.load_model(launch, model, settings, backend, heard.append)
    return heard


@pytest.mark.parametrize("kernels", [Plain(), Keeping()], ids=["dequantised", "kept"])
def test_a_start_says_what_stays_in_fp8_and_what_does_not(
    both: tuple[str, Path, Path], kernels: TorchKernels
) -> None:
    kind, folder, _ = both
    heard = started(folder, kernels)
    (stage,) = [one.stage for one in heard if one.stage and one.stage.total_bytes is None]
    warnings = [one.warning for one in heard if one.warning]
    if not kernels.gemms.keeps_fp8:
        assert stage.detail is None
        text = "fp8 weights are dequantised to float32 as they load: 3 MiB in the files take 12 MiB"
        assert warnings == [text]
        return
    assert stage.detail == "3 MiB of weights in fp8 with 0 MiB of scales"
    if kind == "channel":
        assert not warnings
    else:
        (warning,) = warnings
        first = "model.layers.0.self_attn.q_proj.weight"
        assert warning.endswith(f"take 0 MiB; 6 tensors of 14, {first} the first")


def test_weights_that_stay_in_fp8_count_a_byte_each_before_they_load(
    both: tuple[str, Path, Path],
) -> None:
    sizes = []
    for kernels in (Plain(), Keeping()):
        with pytest.raises(OutOfMemory) as caught:
            started(both[1], kernels, 64 << 20)
        (found,) = re.findall(r"the weights \((\d+) MiB\)", str(caught.value))
        sizes.append(int(found))
    assert sizes == [13, 4]
