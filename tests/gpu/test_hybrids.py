"""Hybrids served on a GPU, by scheduler, segments and captured decodes, against transformers in
float32."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hybrid_models import build, logits_of, save
from pairs import windows_of, worker

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Arena, HostArena, KVShape
from kvline_server.memory.device import cpu_device
from kvline_server.memory.groups import GroupedArena
from kvline_server.memory.state_arena import StateArena
from kvline_server.memory.state_shape import States
from kvline_server.memory.states import StatePool
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder, cache_groups, state_shapes
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker

pytestmark = pytest.mark.gpu
# That the kernels are built for; more value than key heads.
SHARED = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 128}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": SHARED
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "nemotron": SHARED
    | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128}
    | {"moe_intermediate_size": 32},
    "granite": SHARED | {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128},
}
SCANS = ("nemotron-h", "nemotron-h-dense", "nemotron-h-latent", "granite", "granite-moe")
LENGTHS = (1, 3, 63, 64, 65, 130, 200)
RUNNING, SNAPSHOTS, STEP, LONGEST, OUTPUT = 8, 8, 256, 512, 24


class Family(NamedTuple):
    model: torch.nn.Module
    folder: Path


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @functools.cache
    def make(name: str) -> Family:
        (sizes,) = (given for kind, given in SIZES.items() if name.startswith(kind))
        model = build(name, **sizes)
        return Family(model, save(model, tmp_path_factory.mktemp(name)))

    return make


def served(folder: Path, kernels: Kernels, arenas: Callable[[KVShape, int], Arena]) -> Engine:
    config = read_config(folder)
    decoder = Decoder(
        config, load_weights(SafetensorsSource(folder), config, kernels), LONGEST, kernels
    )
    slots, shapes = 1 + RUNNING + SNAPSHOTS, state_shapes(config)
    states = StateArena(shapes, slots, kernels.dtype, torch.float32, kernels.device)
    groups = cache_groups(config, LONGEST, kernels.dtype)
    limit = 200 * max(each.page_bytes for each in groups)
    arena = GroupedArena(groups, arenas, limit, states.layers())
    arena.resize((200,) * len(groups))
    executor = Local(Worker(decoder, arena, 64, RUNNING), cpu_device(None, os.getpid()))
    executor.capture(STEP, LONGEST)
    for memory in arena.layers():
        if isinstance(memory, States):  # no slot is read before it was written
            memory.inputs[1:], memory.matrices[1:] = float("nan"), float("nan")
    return Engine(executor, RUNNING, STEP, LONGEST, (), states=StatePool(RUNNING, SNAPSHOTS))


def on_gpu(folder: Path) -> Engine:
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena

    config = read_config(folder)
    heads = config.heads, config.kv_heads, config.head_dim
    made = served(folder, FlashInferKernels(*heads, windows=windows_of(config)), CudaArena)
    assert worker(made).graphs is not None
    return made


def answers(made: Engine, first: int) -> list[tuple[list[int], list[float], int]]:
    """Of a prompt of each length: tokens, their logprobs, and the prompt's that were cached."""
    params = SamplingParams(OUTPUT, temperature=0.0, ignore_eos=True, logprobs=0)
    sequences = []
    for at, length in enumerate(LENGTHS):
        prompt = [3 + (7 * length + 11 * i * i) % 290 for i in range(length)]
        made.submit(first + at, prompt, params)
        sequences.append(made.sequences[first + at])
    values: dict[int, list[float]] = {}
    while not made.idle:
        for out in made.step():
            assert out.finish != "error" and out.scores is not None
            values.setdefault(out.sequence.id, []).extend(out.scores.values.tolist())
        made.caches.check([each.table for each in made.scheduler.running])
    return [(each.tokens, values[each.id], each.cached) for each in sequences]


class Errors(NamedTuple):
    """Of all answers' tokens, against transformers in float32."""

    each: torch.Tensor  # of their logprobs
    worse: torch.Tensor  # their logprobs than the best token's


def errors(made: Engine, model: torch.nn.Module, turn: int) -> Errors:
    """Cold, then from snapshots."""
    found = []
    for (tokens, values, cached), length in zip(answers(made, 100 * turn), LENGTHS, strict=True):
        assert cached == (0 if turn == 0 else (length - 1) // 64 * 64)
        want = logits_of(model, tokens)[length - 1 : -1].log_softmax(-1)
        chosen = want.gather(1, torch.tensor(tokens[length:]).view(-1, 1)).view(-1)
        found.append(Errors((torch.tensor(values) - chosen).abs(), want.amax(-1) - chosen))
    return Errors(*(torch.cat(every) for every in zip(*found, strict=True)))


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next", *SCANS])
def test_answers_are_as_near_transformers_as_those_of_a_cpu_in_bfloat16(
    family_of: Callable[[str], Family], name: str
) -> None:
    """In bfloat16 a router takes another expert where two are as good, and of Granite's tiny models
    a few logprobs are far off, on any device."""
    family = family_of(name)
    gpu = on_gpu(family.folder)
    cpu = served(family.folder, TorchKernels(torch.bfloat16), HostArena)
    for turn in range(2):
        got, want = (errors(made, family.model, turn) for made in (gpu, cpu))
        figures = [(float(e.each.median()), int((e.worse > 0.5).sum())) for e in (got, want)]
        print(name, turn, *figures, float(got.each.mean()), float(got.worse.max()))
        (median, far), (least, known) = figures
        assert median < 1.5 * least + 0.01 and median < 0.1
        assert far <= 1.5 * known + 3
