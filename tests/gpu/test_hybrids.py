"""Hybrids served on a GPU, by scheduler, segments and captured decodes, against transformers in
float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hybrid_models import build, logits_of, save
from pairs import windows_of, worker

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
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
DENSE = ("qwen3.5", "nemotron-h-dense", "granite")
RUNNING, STEP, LONGEST, OUTPUT = 8, 256, 512, 24


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


def served(folder: Path, snapshots: int = 8) -> Engine:
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena, CudaDevice

    config = read_config(folder)
    heads = config.heads, config.kv_heads, config.head_dim
    kernels = FlashInferKernels(*heads, windows=windows_of(config))
    decoder = Decoder(
        config, load_weights(SafetensorsSource(folder), config, kernels), LONGEST, kernels
    )
    slots, shapes = 1 + RUNNING + snapshots, state_shapes(config)
    states = StateArena(shapes, slots, kernels.dtype, torch.float32, kernels.device)
    groups = cache_groups(config, LONGEST, kernels.dtype)
    limit = 200 * max(each.page_bytes for each in groups)
    arena = GroupedArena(groups, CudaArena, limit, states.layers())
    arena.resize((200,) * len(groups))
    executor = Local(Worker(decoder, arena, 64, RUNNING), CudaDevice())
    assert executor.capture(STEP, LONGEST)
    for memory in arena.layers():
        if isinstance(memory, States):  # no slot is read before it was written
            memory.inputs[1:], memory.matrices[1:] = float("nan"), float("nan")
    return Engine(executor, RUNNING, STEP, LONGEST, (), states=StatePool(RUNNING, snapshots))


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


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next", *SCANS])
def test_answers_are_those_of_transformers(family_of: Callable[[str], Family], name: str) -> None:
    """Cold, and from snapshots: of each token the logprob, and what it is worse than the best."""
    family = family_of(name)
    made, few = served(family.folder), name not in DENSE
    for turn in range(2):
        for (tokens, values, cached), length in zip(
            answers(made, 100 * turn), LENGTHS, strict=True
        ):
            want = logits_of(family.model, tokens)[length - 1 : -1].log_softmax(-1)
            chosen = want.gather(1, torch.tensor(tokens[length:]).view(-1, 1)).view(-1)
            error = (torch.tensor(values) - chosen).abs()
            worse = want.amax(-1) - chosen
            figures = [float(n) for n in (error.median(), error.mean(), worse.max())]
            print(name, turn, length, cached, *figures)
            # In bfloat16 a router takes another expert for some tokens, where two are as good.
            assert figures[0] < 0.1 and ((worse > 0.5).sum() <= 2 if few else figures[2] < 0.5)
            assert cached == (0 if turn == 0 else (length - 1) // 64 * 64)
    assert worker(made).graphs is not None
