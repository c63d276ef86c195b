"""Engines over models with recurrent layers: what a sequence gets depends neither on who had its
slot before nor on where its prompt was cut, cached or preempted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import engine, finish, greedy, spoil, worker
from hybrid_models import build, save

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.work import Work
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.state_shape import States
from kvline_server.memory.states import BOUNDARY

PROMPTS = [[3 + (7 * n + 11 * i * i) % 290 for i in range(n)] for n in (1, 3, 63, 64, 65, 130, 200)]
FAMILIES = ("qwen3.5", "nemotron-h")  # a delta rule, and a scan


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: str) -> Path:
        return save(build(family), tmp_path_factory.mktemp(family))

    return make


def texts(made: Engine, prompts: list[list[int]], tokens: int = 20) -> list[list[int]]:
    first = max(made.sequences, default=-1) + 1 + made.steps * 1000
    for at, prompt in enumerate(prompts):
        made.submit(first + at, list(prompt), greedy(tokens))
    out = finish(made)
    return [[t for item in out[first + at] for t in item.tokens] for at in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_each_prompt_gives_alone(
    folder_of: Callable[[str], Path], family: str
) -> None:
    folder = folder_of(family)
    alone = []
    for prompt in PROMPTS:
        made = engine(folder, step=512)
        spoil(made)
        alone += texts(made, [prompt])
    together = engine(folder, step=512)
    spoil(together)
    assert texts(together, PROMPTS) == alone
    cut = engine(folder, step=8 + BOUNDARY)  # a boundary a step, beside decodes
    assert texts(cut, PROMPTS) == alone
    few = engine(folder, pages=24, step=128)  # 368 tokens for 1,400: some are preempted
    assert texts(few, PROMPTS * 2) == alone * 2 and few.scheduler.preemptions


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_goes_on_from_a_state(folder_of: Callable[[str], Path], family: str) -> None:
    """Each turn has all of the one before; the second of two equal prompts computes its end."""
    folder, turn = folder_of(family), PROMPTS[-1]
    warm, states = engine(folder, step=128), None
    for count in (64, 130, 200, 200):
        cold = engine(folder, step=128)
        assert texts(warm, [turn[:count]]) == texts(cold, [turn[:count]])
        states = warm.caches.states
        assert states is not None and cold.caches.states is not None
        assert not cold.caches.states.hit
        spoil(warm)
    assert states is not None
    assert states.hit == 64 + 128 + 192 and not states.lost


def test_a_turn_goes_on_from_the_state_that_the_answer_before_left(
    folder_of: Callable[[str], Path],
) -> None:
    folder, prompt = folder_of("qwen3.5"), PROMPTS[3]
    warm = engine(folder, step=128)
    (answer,) = texts(warm, [prompt], tokens=100)
    states = warm.caches.states
    assert states is not None and not states.hit
    follows = prompt + answer + [5, 6, 7]
    assert texts(warm, [follows]) == texts(engine(folder, step=128), [follows])
    assert states.hit == (len(prompt) + 99) // BOUNDARY * BOUNDARY


def test_states_in_bfloat16_answer_nearly_as_those_in_float32(
    folder_of: Callable[[str], Path],
) -> None:
    """And the same tokens whatever else a step computes and wherever prompts are cut."""
    folder, prompts = folder_of("qwen3.5"), PROMPTS[3:]

    def scored(**more: Any) -> tuple[list[np.ndarray], list[list[int]], list[np.ndarray]]:
        """Logprobs of each prompt's tokens but for its first; answers, and their logprobs."""
        made = engine(folder, rows=256, **more)
        spoil(made)
        for id, prompt in enumerate(prompts):
            made.submit(id, list(prompt), greedy(20, prompt_logprobs=0, logprobs=0))
        outputs = [each for _, each in sorted(finish(made).items())]
        given = [[x.prompt_scores.values for x in each if x.prompt_scores] for each in outputs]
        answers = [[t for item in each for t in item.tokens] for each in outputs]
        values = [np.concatenate([x.scores.values for x in each if x.scores]) for each in outputs]
        return [one for (one,) in given], answers, values

    wide, small = scored(step=512), scored(step=512, matrices=torch.bfloat16)
    for one, other in zip(wide[0], small[0], strict=True):
        assert np.abs(one - other).max() < 0.03, "nats"
    for *answers, one, other in zip(wide[1], small[1], wide[2], small[2], strict=True):
        same = next((n for n, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), 20)
        assert same >= 3 and 0 < np.abs(one - other)[:same].max() < 0.3, "nats"
    again = scored(step=8 + BOUNDARY, running=3, matrices=torch.bfloat16)
    assert again[1] == small[1]
    for one, other in zip(small[0], again[0], strict=True):
        assert np.abs(one - other).max() < 1e-3


def test_snapshots_and_preemption_conserve_slots_in_bfloat16(
    folder_of: Callable[[str], Path],
) -> None:
    """The tokens of a prefix that goes on from a snapshot are those of a cold start. `finish`
    checks that no slot is lost after each step."""
    folder, turn = folder_of("qwen3.5"), PROMPTS[-1]
    warm = engine(folder, step=128, matrices=torch.bfloat16)
    for count in (64, 130, 200, 200):
        cold = engine(folder, step=128, matrices=torch.bfloat16)
        assert texts(warm, [turn[:count]]) == texts(cold, [turn[:count]])
        spoil(warm)
    states = warm.caches.states
    assert states is not None and states.hit == 64 + 128 + 192 and not states.lost
    few = engine(folder, pages=24, step=128, matrices=torch.bfloat16)
    made = texts(few, PROMPTS * 2)
    assert few.scheduler.preemptions and all(len(tokens) == 20 for tokens in made)
    states = few.caches.states
    assert states is not None and not states.used
    assert states.free + states.cached == states.total
    for layer in worker(few).arena.layers():
        if isinstance(layer, States):
            assert layer.matrices.dtype == torch.bfloat16
            kept = [each.slot for each in states._of.values()]
            assert layer.matrices[kept].isfinite().all()


def test_who_leaves_in_the_middle_of_a_prompt_gives_its_slot_back(
    folder_of: Callable[[str], Path],
) -> None:
    made = engine(folder_of("qwen3.5"), running=2, step=80)
    for id in range(6):
        made.submit(id, list(PROMPTS[-1]), greedy(4))
    for id in range(5):
        made.step()
        made.abort(id)
        made.caches.check([each.table for each in made.scheduler.running])
        spoil(made)
    out = finish(made)
    tokens = [t for item in out[5] for t in item.tokens]
    assert [tokens] == texts(engine(folder_of("qwen3.5"), step=80), [PROMPTS[-1]], 4)


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_a_preempted_answer_is_not_computed_again(
    folder_of: Callable[[str], Path],
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """But for what is behind its last full page, or the state that it left last, and it goes on as
    if nothing had been: with logprobs of its prompt and penalties too."""
    folder = make_model(family) if family == "llama" else folder_of(family)
    every = PAGE_SIZE if family == "llama" else BOUNDARY
    asked = greedy(72, prompt_logprobs=1, frequency_penalty=0.5, cache_salt="mine")
    prompt, wanted = PROMPTS[4], list[int]()
    for at in (0, 63, 64, 70):
        made, got, begun = engine(folder, step=128), list[Output](), list[Work]()
        made.submit(0, list(prompt), asked)
        while len(got) < at:
            got += made.step()
        if at:
            spoil(made)
            with monkeypatch.context() as patched:
                patched.setattr(made.scheduler, "advance", advancing(made.scheduler, begun))
                made.scheduler._preempt(made.sequences[0])
                spoil(made)
                got += made.step()
            length, found = len(prompt) + at, (len(prompt) + at - 1) // every * every
            assert [(w.start, w.rows) for w in begun] == [(found, length - found)]
        got += finish(made)[0]
        tokens = [token for item in got for token in item.tokens]
        wanted = wanted or tokens
        assert tokens == wanted and len(tokens) == 72
        assert [item.prompt_scores is not None for item in got] == [True] + [False] * 71
        assert made.scheduler.preemptions == bool(at) and not made.caches.used


def advancing(scheduler: Scheduler, begun: list[Work]) -> Callable[[list[Work]], None]:
    """Which notes the work of each step."""
    advance = scheduler.advance

    def noting(work: list[Work]) -> None:
        begun.extend(work)
        advance(work)

    return noting
