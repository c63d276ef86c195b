"""On a GPU too, keys and values that are not finite end with the request that made them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from engines import key_values
from pairs import engine, worker

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.arena import Scales, as_words
from kvline_server.model.config import ModelConfig

pytestmark = pytest.mark.gpu
BAD = 4999  # a token whose embedding is NaN
CACHES = pytest.mark.parametrize("scales", [(), (Scales(0.02, 0.01),) * 3], ids=["bf16", "fp8"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def poisoned(made: Engine, depth: int) -> Engine:
    """Every page holds NaN, as a start's steps may leave them."""
    runner = worker(made)
    runner.kernels.depth = depth
    runner.decoder.weights.embedding[BAD] = float("nan")
    for layer in key_values(runner.arena):
        for part in (layer.keys, layer.values):
            as_words(part).fill_(-1)  # of any dtype's bits a NaN
    return made


def prompt(id: int, length: int) -> list[int]:
    return [(31 * id + 7 * i) % BAD for i in range(length)]


def asked(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, 0.0, ignore_eos=True, logit_bias={BAD: -100.0})


@CACHES
@DEPTHS
def test_random_loads_with_bad_requests_fail_no_other(
    shape: Callable[..., ModelConfig], scales: tuple[Scales, ...], depth: int
) -> None:
    """Prompts, decodes and mixed steps behind the ends of others; prefixes are shared, clients
    leave, and sequences are preempted."""
    rng = random.Random(depth)
    made = poisoned(engine(shape(128), 40, 16, 64, scales), depth)
    broken: dict[int, bool] = {}
    finishes: dict[int, str | None] = {}
    id = 0
    while id < 400 or not made.idle:
        if id < 400 and rng.random() < 0.5:
            breaks = rng.random() < 0.2
            kind = rng.randrange(6) + 6 * breaks  # good ones may share what is not confirmed
            tokens = prompt(kind, rng.randint(1, 180))
            if breaks:
                tokens[rng.randrange(len(tokens))] = BAD
            made.submit(id, tokens, asked(rng.randint(1, 60)))
            broken[id] = breaks
            id += 1
        for output in made.step():
            finishes[output.sequence.id] = output.finish
        if rng.random() < 0.05 and made.sequences:
            gone = rng.choice(list(made.sequences))
            made.abort(gone)
            del broken[gone]
            finishes.pop(gone, None)
        made.caches.check([each.table for each in made.scheduler.running])
    assert made.scheduler.preemptions and made.caches.used == 0
    wrong = {one for one, breaks in broken.items() if (finishes[one] == "error") != breaks}
    assert not wrong


@CACHES
def test_a_page_is_cleared_in_every_layer_and_no_other(
    shape: Callable[..., ModelConfig], scales: tuple[Scales, ...]
) -> None:
    arena = worker(poisoned(engine(shape(128), 80, scales=scales), 0)).arena
    arena.clear(0, torch.tensor([3, 77, 3], device="cuda"))
    for layer in key_values(arena):
        for part in (layer.keys, layer.values):
            bad = part.float().isnan().flatten(1)
            assert [i for i, page in enumerate(bad) if not page.any()] == [3, 77]
            assert bad.sum() == 78 * bad.shape[1]
