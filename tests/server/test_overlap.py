"""A step prepared while the one before runs: whatever ends, leaves or is preempted in between, the
answers are those of an engine that waits for each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import engine

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.request import SamplingParams

EOS = (11, 40, 77, 130, 200)
ABORTED = 5  # every so-manieth request is given up by its client


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    made = []
    for id in range(count):
        shared = [7] * 32 if rng.random() < 0.3 else []  # a prefix that the cache holds
        prompt = shared + [rng.randrange(300) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 5, 17, 40]),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=id,
            ignore_eos=rng.random() < 0.4,
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.7]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
        made.append((prompt, params))
    return made


def play(made: Engine, depth: int, wanted: list[tuple[list[int], SamplingParams]]) -> Any:
    """Requests come in bursts, some clients leave; all outputs by request."""
    made.runner.kernels.depth = depth  # type: ignore[misc]
    rng = random.Random(1)
    out: dict[int, list[Output]] = {id: [] for id in range(len(wanted))}
    left = iter(enumerate(wanted))
    done = False
    while not (done and made.idle):
        for _ in range(rng.choice([0, 0, 1, 3])):
            item = next(left, None)
            if item is None:
                done = True
                break
            id, (prompt, params) = item
            made.submit(id, list(prompt), params)
        for output in made.step():
            id = output.sequence.id
            out[id].append(output)
            if id % ABORTED == 0 and len(out[id]) == 2:
                made.abort(id)
        made.pool.check()
    assert made.pool.used == 0
    assert not made.sequences
    return out


def said(outputs: list[Output]) -> list[tuple[int, str | None, Any, Any]]:
    rows: list[tuple[int, str | None, Any, Any]] = []
    for o in outputs:
        prompt = None if o.prompt_scores is None else o.prompt_scores.tokens.tolist()
        scores = None if o.scores is None else o.scores.top_ids.tolist()
        rows.append((o.token, o.finish, scores, prompt))
    return rows


@pytest.mark.parametrize("pages", [12, 200])
def test_a_step_ahead_changes_no_answer(make_model: Callable[..., Path], pages: int) -> None:
    """With few pages sequences are preempted while a token of theirs is unread."""
    wanted = requests(pages, 80)
    sides = []
    for depth in (0, 1):
        made = engine(make_model("qwen2"), pages=pages, running=6, step=48, model_len=150)
        made.eos_token_ids = frozenset(EOS)
        sides.append((made, play(made, depth, wanted)))
    (waiting, want), (ahead, got) = sides
    if pages == 12:
        assert waiting.scheduler.preemptions and ahead.scheduler.preemptions
    for id in want:
        if id % ABORTED == 0:  # how much was said before the client left is chance
            assert said(got[id])[:2] == said(want[id])[:2]
        else:
            assert said(got[id]) == said(want[id]), id
    finishes = {o.finish for outputs in want.values() for o in outputs}
    assert finishes == {None, "stop", "length"}
