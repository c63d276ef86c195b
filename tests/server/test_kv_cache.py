"""An fp8 KV cache on the CPU: what it stores, how near its answers are, where its scales are."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Drawn
from engines import engine, finish, greedy, key_values, worker
from near import FLIPPED, TOLERANCE, flips
from safetensors.torch import load_file, save_file
from servers import Server, launch_config
from ties import mostly_same, same_tokens

from kvline_contract.launch import EngineOptions, KVCacheDtype, LaunchConfig
from kvline_server.engine.engine import Engine
from kvline_server.engine.request import Scores
from kvline_server.errors import ModelInvalid
from kvline_server.ipc.messages import Progress
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.attention import Heads, SlotMapping
from kvline_server.kernels.layout import GroupLayout, Layout
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import KVLayer, Scales
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE
from kvline_server.model import kv_scales
from kvline_server.model.config import read_config
from kvline_server.model.loader import SafetensorsSource
from kvline_server.sizing import load
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.settings import resolve
from kvline_server.worker.backend import open_backend

FP8 = torch.float8_e4m3fn
MOST = 448.0
KEYS, VALUES = ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale")
PROMPT = [(7 * i) % 300 for i in range(150)]
OPTIONS = EngineOptions(256, 2, 64, kv_cache_dtype=KVCacheDtype.FP8)


def layout(decode: int, chunk: int) -> Layout:
    """A decode at `decode` tokens in pages 3, 1, then a prompt of `chunk` tokens in page 2."""
    return Layout(
        decodes=1,
        row_starts=np.array([0, 1, 1 + chunk], np.int32),
        positions=np.array([decode - 1, *range(chunk)], np.int32),
        groups=(
            GroupLayout(
                lengths=np.array([decode, chunk], np.int32),
                page_starts=np.array([0, 2, 3], np.int32),
                pages=np.array([3, 1, 2], np.int32),
                slots=np.array([decode - 1, *range(32, 32 + chunk)], np.int64),
                cleared=np.zeros(0, np.int64),
            ),
        ),
    )


@pytest.mark.parametrize("scales", [Scales(), Scales(0.25, 0.07)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_stores_what_scales_bring_into_range_and_attends_to_what_that_stands_for(
    scales: Scales, dtype: torch.dtype
) -> None:
    """Numbers beyond the range become the largest, never a NaN; an unquantised cache of the same
    numbers gives the same attention."""
    torch.manual_seed(3)
    attention, rows, queries, keys, dim = TorchKernels(dtype).attention, 12, 4, 2, 8
    shape = (4, PAGE_SIZE, keys, dim)
    cache = KVLayer(torch.zeros(shape, dtype=FP8), torch.zeros(shape, dtype=FP8), scales)
    fused = (3 * torch.randn(rows, queries + 2 * keys, dim)).to(dtype)
    fused[5, queries + keys], fused[6, queries] = 9e4, -9e4
    old = (torch.randn(2, PAGE_SIZE, keys, dim) * 2).to(FP8)
    cache.keys[3], cache.values[3] = old
    plain = Heads(fused.clone(), queries, keys, None, None, 1e-5)
    rope = attention.rope_table(torch.ones(64, dim // 2), torch.zeros(64, dim // 2))
    step = layout(PAGE_SIZE + 1, rows - 1)
    mapping = SlotMapping(torch.from_numpy(step.positions), torch.from_numpy(step.groups[0].slots))
    attention.write(plain, rope, mapping, cache)
    for stored, first, scale in (
        (cache.keys, queries, scales.keys),
        (cache.values, queries + keys, scales.values),
    ):
        given = fused[:, first : first + keys].float()
        got = stored.view(torch.uint8).view(-1, keys, dim)[mapping.slots].view(FP8).float()
        wanted = (given / scale).clamp(-MOST, MOST)
        assert got.isfinite().all() and got.abs().max() == MOST
        assert ((got - wanted).abs() <= wanted.abs() / 16 + 2**-10).all()
    same = KVLayer(
        (cache.keys.float() * scales.keys).to(dtype),
        (cache.values.float() * scales.values).to(dtype),
    )
    q = plain.fused[:, :queries]
    got = attention.attend(q, cache, attention.plan(step, 0, 0)).float()
    want = attention.attend(q, same, attention.plan(step, 0, 0)).float()
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((got - want).norm() / want.norm()) < bound


def scaled(source: Path, folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of a model, whose files have these scales too."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | scales, folder / "model.safetensors")
    return folder


def calibrated(source: Path, folder: Path, layers: int = 2) -> Path:
    """With the scales that bring the largest number of each layer to the end of e4m3's range."""
    made = engine(source)
    answer(made, 8)
    scales = {}
    for index, kv in enumerate(key_values(worker(made).arena)):
        # Not of the dummy page: no expert gets its rows, so they have whatever memory had.
        keys, values = (each[DUMMY_PAGE + 1 :].abs().max() for each in (kv.keys, kv.values))
        scales[KEYS.format(index)] = keys.reshape(1) / MOST
        scales[VALUES.format(index)] = values.reshape(()).clone() / MOST
    assert len(scales) == 2 * layers
    return scaled(source, folder, scales)


def answer(made: Engine, count: int = 24, **more: Any) -> tuple[list[int], Scores]:
    """Output tokens and the scores of the prompt."""
    made.submit(0, list(PROMPT), greedy(count, prompt_logprobs=5, **more))
    (outputs,) = finish(made).values()
    assert outputs[0].prompt_scores is not None
    return [token for o in outputs for token in o.tokens], outputs[0].prompt_scores


def distance(a: Scores, b: Scores) -> float:
    """Of the logprobs of the prompt's tokens, in nats."""
    return float(np.abs(a.values - b.values).mean())


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral-window",
        "qwen2",
        "qwen3",
        "phi3",
        "olmo2",
        "gemma3",
        "qwen3-moe",
        "mixtral",
        "gpt-oss",
    ],
)
def test_answers_are_near_those_of_the_cache_that_is_not_quantised(
    family: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Logprobs of the prompt's tokens, and the most likely token behind each: of random weights,
    whose tokens are near to one another."""
    layers = 4 if family in ("gemma3", "gpt-oss") else 2
    folder = calibrated(make_model(family), tmp_path / "fp8", layers)
    want, got = (answer(engine(folder, fp8_cache=on))[1] for on in (False, True))
    assert 0 < distance(got, want) < 0.05
    assert (got.top_ids[:, 0] == want.top_ids[:, 0]).mean() > 0.85


def test_scales_of_the_files_are_what_keeps_large_and_small_numbers(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Values a thousandth of their size and keys a thousand times as large, which the weights of
    queries and outputs make good: without scales e4m3 has neither."""
    folder = tmp_path / "odd"
    shutil.copytree(make_model("mixtral"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, by in (("q", 2**-12), ("k", 2.0**12), ("v", 2**-12), ("o", 2.0**12)):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] *= by
    save_file(tensors, folder / "model.safetensors")
    want = answer(engine(folder))[1]
    bad = distance(answer(engine(folder, fp8_cache=True))[1], want)
    good = calibrated(folder, tmp_path / "fp8")
    assert distance(answer(engine(good, fp8_cache=True))[1], want) < 0.05 < 0.2 < bad


def test_chunks_and_the_prefix_cache_change_no_token(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A chunk attends to what the cache has of itself too, so all see the same numbers."""
    folder = calibrated(make_model("llama"), tmp_path / "fp8")
    penalties: dict[str, Any] = {"frequency_penalty": 0.4, "repetition_penalty": 1.2}
    asked = [greedy(24, seed=seed, **penalties) for seed in range(2)]
    whole = engine(folder, step=256, fp8_cache=True)
    drawn = Drawn(whole)
    want, _ = played(whole, asked[0])
    same = []
    for step in (37, 64):
        made = engine(folder, step=step, fp8_cache=True)
        for params in asked[: 1 if step == 37 else 2]:
            got, cached = played(made, params)
            most = FLIPPED if flips(stored(made), stored(whole)) else TOLERANCE
            same.append(same_tokens(got, want, asked[0], drawn.logits(asked[0], 24), most))
    mostly_same(same, 3 * 24, least=0.5)
    assert cached > 100


def played(made: Engine, params: SamplingParams) -> tuple[list[int], int]:
    """Output tokens, and how many of the prompt's came from the prefix cache."""
    made.submit(0, list(PROMPT), params)
    (outputs,) = finish(made).values()
    return [token for o in outputs for token in o.tokens], outputs[0].sequence.cached


def stored(made: Engine) -> list[np.ndarray]:
    """The prompt's keys and values of each layer, which are in the first pages."""
    pages = slice(1, 1 + len(PROMPT) // PAGE_SIZE)
    layers = key_values(worker(made).arena)
    return [torch.stack((kv.keys, kv.values))[:, pages].view(torch.uint8).numpy() for kv in layers]


def loaded(launch: LaunchConfig) -> tuple[Loaded, list[str]]:
    """As an engine process loads it, and its warnings."""
    found: list[str] = []

    def send(progress: Progress) -> None:
        if progress.warning is not None:
            found.append(progress.warning)

    model = load.read_model(launch)
    backend = open_backend(launch, 8 << 30, os.getpid(), lambda text: None)
    settings = resolve(launch, model, backend.device.limit)
    return load.load_model(launch, model, settings, backend, send)[0], found


def test_a_start_says_the_dtype_takes_a_quarter_and_warns_once_of_scales_that_lack(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("llama")
    plain, warnings = loaded(launch_config(folder, EngineOptions(256, 2, 64)))
    assert warnings == [] and plain.cache_dtype == "float32"
    fp8, warnings = loaded(launch_config(folder, OPTIONS))
    assert fp8.cache_dtype == "float8_e4m3fn"
    assert 4 * fp8.bytes_per_token == plain.bytes_per_token
    assert fp8.fingerprint != plain.fingerprint, "records of one are none of the other"
    (text,) = warnings
    assert "spec.engine.kvCacheDtype is fp8, and the model's files lack 4 of the 4 scales" in text
    assert "serve a checkpoint that was calibrated" in text
    partly = scaled(folder, tmp_path / "partly", {KEYS.format(1): torch.tensor(0.5)})
    ((text,), (_, none)) = (
        loaded(launch_config(partly, OPTIONS))[1],
        loaded(launch_config(calibrated(folder, tmp_path / "all"), OPTIONS)),
    )
    assert "lack 3 of the 4 scales" in text and none == []


def test_without_an_fp8_cache_scales_are_not_read(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    bad = {KEYS.format(0): torch.tensor([float("nan")] * 3)}
    folder = scaled(make_model("llama"), tmp_path / "bad", bad)
    explicit = EngineOptions(256, 2, 64, kv_cache_dtype=KVCacheDtype.AUTO)
    for options in (EngineOptions(256, 2, 64), explicit):
        assert loaded(launch_config(folder, options))[1] == []
    with pytest.raises(ModelInvalid, match=re.escape(KEYS.format(0))):
        loaded(launch_config(folder, OPTIONS))


def test_scales_are_found_by_either_name(make_model: Callable[..., Path], tmp_path: Path) -> None:
    made = {
        KEYS.format(0): torch.tensor([0.5]),
        VALUES.format(0): torch.tensor(0.25, dtype=torch.bfloat16),
        "model.layers.1.self_attn.k_proj.output_scale": torch.tensor(2.0),
    }
    folder = scaled(make_model("llama"), tmp_path / "fp8", made)
    found = kv_scales.read(SafetensorsSource(folder), read_config(folder))
    assert found == ((Scales(0.5, 0.25), Scales(2.0, 1.0)), 1)


@pytest.mark.parametrize(
    ("scale", "why"),
    [
        (torch.ones(2), "has shape [2], an fp8 KV cache takes one scale for all heads of a layer"),
        (torch.tensor(float("nan")), "is nan (torch.float32)"),
        (torch.tensor(float("inf")), "is inf"),
        (torch.tensor([0.0]), "is 0.0"),
        (torch.tensor(-0.5), "must be a positive, finite float"),
        (torch.tensor(1e-42), "must be a positive, finite float"),
        (torch.tensor(1), "is 1.0 (torch.int64)"),
    ],
)
def test_a_scale_that_is_not_right_is_named(
    scale: torch.Tensor, why: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    name = VALUES.format(1)
    folder = scaled(make_model("llama"), tmp_path / "bad", {name: scale})
    with pytest.raises(ModelInvalid, match=re.escape(f"tensor {name} {why}"[:40])) as caught:
        kv_scales.read(SafetensorsSource(folder), read_config(folder))
    assert why in str(caught.value)


@pytest.mark.process
def test_a_server_sizes_and_serves_with_it(start: Callable[..., Server]) -> None:
    server = start(engine=OPTIONS)
    server.wait()
    result = server.probe("/sizing?version=2")[1]["result"]
    layers, heads, dim = 2, 2, 8
    assert result["cacheDtype"] == "float8_e4m3fn"
    assert result["bytesPerToken"] == 2 * layers * heads * dim
    found = server.complete(prompt="a b c", max_tokens=4, temperature=0, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 4
    server.stop()
    assert "lack 4 of the 4 scales" in server.output()
