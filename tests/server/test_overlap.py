"""Asynchronous scheduling: with a step in flight while the next is prepared, outputs equal those of
an engine that waits for each step, whatever finishes, is aborted or is preempted. The two have
other batches, so they may go on with other tokens from a tie on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import Drawn
from engines import engine, worker
from near import same_ranking
from ties import mostly_same, same_tokens

from kvline_server.engine.engine import Engine, Output
from kvline_server.ipc.sampling_params import SamplingParams

EOS = (11, 40, 77, 130, 200)
ABORTED = 5  # every fifth request is aborted by its client


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    made = []
    for id in range(count):
        shared = [7] * 32 if rng.random() < 0.3 else []  # a shared prefix
        prompt = shared + [rng.randrange(300) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 5, 17, 40]),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=id,
            ignore_eos=rng.random() < 0.4,
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.7]),
            logit_bias=rng.choice([{}, {}, {11: 3.0}]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            params = SamplingParams(0, temperature=0.0, seed=id, prompt_logprobs=0)
        made.append((prompt, params))
    return made


def play(made: Engine, depth: int, wanted: list[tuple[list[int], SamplingParams]]) -> Any:
    """Requests come in bursts, some clients leave; all outputs by request."""
    worker(made).kernels.depth = depth
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
        made.caches.check([each.table for each in made.scheduler.running])
    assert made.caches.used == 0
    assert not made.sequences
    return out


def compare(got: list[Output], want: list[Output], params: SamplingParams, drawn: Drawn) -> int:
    """-> how many tokens are the same"""
    tokens, wanted = ([token for o in side for token in o.tokens] for side in (got, want))
    same = same_tokens(tokens, wanted, params, drawn.logits(params, len(want)))
    for one, other in zip(got[:same], want[:same], strict=True):
        assert one.finish == other.finish
        for a, b in ((one.scores, other.scores), (one.prompt_scores, other.prompt_scores)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert np.array_equal(a.tokens, b.tokens)
                same_ranking((a.top_ids, a.top_values), (b.top_ids, b.top_values))
    return same


@pytest.mark.parametrize("pages", [11, 200])
def test_a_step_in_flight_changes_no_output(make_model: Callable[..., Path], pages: int) -> None:
    """With few pages, sequences are preempted while one of their tokens is not read yet."""
    wanted = requests(pages, 80)
    sides = []
    for depth in (0, 1):
        made = engine(make_model("qwen2"), pages=pages, running=6, step=48, model_len=150)
        made.eos_token_ids = frozenset(EOS)
        drawn = Drawn(made)
        sides.append((made, play(made, depth, wanted), drawn))
    (waiting, want, drawn), (ahead, got, _) = sides
    if pages == 11:
        assert waiting.scheduler.preemptions and ahead.scheduler.preemptions
    same = count = 0
    for id, (_, params) in enumerate(wanted):
        # The number of tokens before an abort varies.
        most = 2 if id % ABORTED == 0 else None
        same += compare(got[id][:most], want[id][:most], params, drawn)
        count += len(want[id][:most])
    mostly_same([same], count)
    finishes = {o.finish for outputs in want.values() for o in outputs}
    assert finishes == {None, "stop", "length"}


PLAIN = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=12, temperature=0.0, frequency_penalty=0.5, ignore_eos=True)
BIASED = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={3: 1.0}, ignore_eos=True)


def in_flight(made: Engine, steps: int) -> list[int]:
    """Steps in flight after each of `steps` engine steps."""
    worker(made).kernels.depth = 1
    seen = []
    for _ in range(steps):
        made.step()
        seen.append(len(made._in_flight))
    return seen


@pytest.mark.parametrize("queued", [PENALISED, BIASED])
def test_a_queued_request_with_penalties_or_a_bias_serialises_no_others(
    make_model: Callable[..., Path], queued: SamplingParams
) -> None:
    made = engine(make_model("llama"), running=2)
    for id in range(2):
        made.submit(id, [1, 2, 3 + id], PLAIN)
    made.submit(9, [5, 6, 7], queued)
    assert in_flight(made, 8) == [1] * 8
    assert 9 in {s.id for s in made.scheduler.waiting}


def test_a_logit_bias_does_not_wait_for_the_last_token(make_model: Callable[..., Path]) -> None:
    made = engine(make_model("llama"))
    for id, params in enumerate((PLAIN, BIASED)):
        made.submit(id, [1, 2, 3 + id], params)
    assert in_flight(made, 8) == [1] * 8
    assert all(len(s.tokens) == 3 + 7 for s in made.sequences.values())


def test_a_penalised_request_is_in_every_step(make_model: Callable[..., Path]) -> None:
    """Its edits follow from its last token, which is read while the step's forward pass runs."""
    made = engine(make_model("llama"))
    for id, params in enumerate((PLAIN, PLAIN, PENALISED)):
        made.submit(id, [1, 2, 3 + id], params)
    assert in_flight(made, 9) == [1] * 9
    assert [len(made.sequences[id].tokens) - 3 for id in range(3)] == [8, 8, 8]
    alone = engine(make_model("llama"))
    alone.submit(0, [1, 2, 5], PENALISED)
    in_flight(alone, 9)
    assert len(alone.sequences[0].tokens) - 3 == 8
