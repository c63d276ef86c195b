"""Two GPUs and one against the same model in float32 on the CPU: whole steps, with graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import SameOnBoth
from torch.multiprocessing.spawn import spawn

from kvline_server.engine.engine import Engine, Output
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import HostArena
from kvline_server.memory.device import cpu_device
from kvline_server.memory.groups import GroupedArena
from kvline_server.model.config import Experts, ModelConfig
from kvline_server.model.decoder import Decoder, cache_groups
from kvline_server.model.loader import load_weights
from kvline_server.model.shard import Shard, local
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="fewer than two GPUs here"),
]
PAGES, STEP, ROWS = 400, 256, 64
ASKED: dict[int, tuple[int, dict[str, Any]]] = {  # prompt tokens, what is asked
    **{id: (40 + 31 * id, {"temperature": 0.0, "prompt_logprobs": 20}) for id in range(6)},
    6: (70, {"temperature": 0.9, "seed": 3, "logprobs": 4}),
    7: (20, {"temperature": 0.7, "seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.01}),
    8: (9, {"temperature": 0.8, "seed": 5, "top_p": 0.8, "frequency_penalty": 0.5}),
}
TOKENS = 12


@pytest.mark.parametrize(
    ("qk_norm", "more"),
    [
        (False, {}),
        (True, {}),
        (True, {"experts": Experts(16, 4, True, "mlp."), "intermediate": 256}),
    ],
    ids=["llama", "qwen3", "experts"],
)
def test_two_gpus_are_as_near_to_float32_as_one(
    qk_norm: bool, more: dict[str, Any], shape: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    model = shape(128, qk_norm, max_position=512, **more)
    for ranks in (1, RANKS):
        spawn(of_rank, (ranks, model, tmp_path), nprocs=ranks)  # type: ignore[no-untyped-call]
    exact = answers(on_cpu(model))
    one, two, other = (read(tmp_path, *which) for which in ((1, 0), (2, 0), (2, 1)))
    assert all(np.array_equal(two[key], other[key]) for key in two), "ranks differ"
    distance = {name: apart(made, exact) for name, made in (("one", one), ("two", two))}
    print(distance)
    assert distance["two"] < 1.2 * distance["one"], distance
    agree = {name: agreement(made, exact) for name, made in (("one", one), ("two", two))}
    print(agree)
    assert agree["two"] >= agree["one"] - 0.1, agree
    for id, (_, asked) in ASKED.items():
        assert len(two[f"{id}.tokens"]) == TOKENS, asked


def apart(made: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """The mean distance of prompt logprobs."""
    keys = [key for key in exact if key.endswith(".prompt")]
    return float(np.mean([np.abs(made[key] - exact[key]).mean() for key in keys]))


def agreement(made: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """The share of greedy tokens before the first that differs."""
    same = []
    for id, (_, asked) in ASKED.items():
        if asked["temperature"] == 0.0:
            equal = made[f"{id}.tokens"] == exact[f"{id}.tokens"]
            same.append(np.cumprod(equal).mean())
    return float(np.mean(same))


def of_rank(rank: int, ranks: int, model: ModelConfig, folder: Path) -> None:
    """In a process of its own: every rank has an engine, which its results keep in step."""
    from kvline_server.parallel.symmetric import SymmetricGroup

    torch.cuda.set_device(rank)
    group: Group = ALONE
    if ranks > 1:
        group = SymmetricGroup(rank, ranks, folder, STEP * model.hidden, torch.bfloat16)
    made: dict[str, Any] = answers(on_gpu(model, group))
    np.savez(folder / f"{ranks}-{rank}.npz", **made)


def read(folder: Path, ranks: int, rank: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"{ranks}-{rank}.npz") as found:
        return dict(found)


def on_gpu(model: ModelConfig, group: Group) -> Engine:
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena, CudaDevice

    shard = Shard(group.rank, group.ranks)
    mine = local(model, shard)
    kernels = FlashInferKernels(mine.heads, mine.kv_heads, mine.head_dim, group)
    arena = mapped(mine, CudaArena, kernels.dtype)
    weights = load_weights(SameOnBoth(), model, kernels, shard=shard)
    worker = Worker(Decoder(mine, weights, model.max_position, kernels), arena, ROWS, 16)
    executor = Local(worker, CudaDevice())
    with group.apart():
        executor.capture(STEP, model.max_position)
    return Engine(executor, 16, STEP, model.max_position, ())


def mapped(model: ModelConfig, arena_of: Any, dtype: torch.dtype) -> GroupedArena:
    (group,) = cache_groups(model, model.max_position, dtype)
    arena = GroupedArena((group,), arena_of, PAGES * group.page_bytes)
    arena.resize((PAGES,))
    return arena


def on_cpu(model: ModelConfig) -> Engine:
    kernels = TorchKernels()
    arena = mapped(model, HostArena, kernels.dtype)
    weights = load_weights(SameOnBoth(), model, kernels)
    worker = Worker(Decoder(model, weights, model.max_position, kernels), arena, ROWS, 16)
    return Engine(Local(worker, cpu_device(None, 0)), 16, STEP, model.max_position, ())


def answers(made: Engine) -> dict[str, np.ndarray]:
    known = 5000
    for id, (length, asked) in ASKED.items():
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **asked)
        made.submit(id, [(31 * id + 7 * i * i) % known for i in range(length)], params)
    outputs: dict[int, list[Output]] = {}
    while not made.idle:
        for output in made.step():
            outputs.setdefault(output.sequence.id, []).append(output)
    out = {
        f"{id}.tokens": np.array([token for o in found for token in o.tokens])
        for id, found in outputs.items()
    }
    for id, found in outputs.items():
        if (scores := found[0].prompt_scores) is not None:
            out[f"{id}.prompt"] = scores.values
    return out
