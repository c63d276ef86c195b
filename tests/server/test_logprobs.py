"""Logprobs in chunks: not one bit depends on the chunk size, and mixed batches lose nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drawn import Drawn
from engines import engine, finish, greedy, worker
from ties import mostly_same, same_tokens

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.request import Scores
from kvline_server.ipc.sampling_params import SamplingParams

# What a request may ask: prompt logprobs (None, k), output logprobs.
KINDS: list[tuple[int | None, int | None]] = [
    (None, None),
    (0, None),
    (3, 2),
    (2, None),
    (1, 0),
    (1, 1),
    (None, 4),
]
LENGTHS = (10, 7, 12, 5)


def run(made: Engine, kinds: tuple[int, ...], rows: int) -> dict[int, list[Output]]:
    worker(made).logprob_rows = rows
    for id, kind in enumerate(kinds):
        prompt, output = KINDS[kind]
        params = SamplingParams(
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=prompt,
            logprobs=output,
        )
        tokens = [(31 * id + 7 * i) % 250 for i in range(LENGTHS[id])]
        made.submit(id, tokens, params)
    return finish(made)


def same(one: Scores | None, other: Scores | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in Scores.__slots__
    )


# In every order, every mix of up to three requests of four kinds that differ in all that matters,
# and of up to two of all kinds; of four requests each mix in one order.
FOUR = (0, 2, 3, 5)
MIXES = sorted(
    {mix for size in range(1, 4) for mix in itertools.product(FOUR, repeat=size)}
    | {mix for size in (1, 2) for mix in itertools.product(range(len(KINDS)), repeat=size)}
    | set(itertools.combinations_with_replacement(FOUR, 4))
)


@pytest.fixture(scope="module")
def made(make_model: Callable[..., Path]) -> Engine:
    return engine(make_model("qwen3-shallow"), step=64)


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_chunk_size_changes_no_bit(made: Engine, first: int) -> None:
    """Every mix, every chunk size from 1 to 8, against unchunked."""
    for mix in (m for m in MIXES if m[0] == first):
        fresh(made)
        whole = run(made, mix, 10_000)
        for rows in range(1, 9):
            fresh(made)
            chunked = run(made, mix, rows)
            for id in range(len(mix)):
                assert [token for o in whole[id] for token in o.tokens] == [
                    token for o in chunked[id] for token in o.tokens
                ]
                for a, b in zip(whole[id], chunked[id], strict=True):
                    assert same(a.scores, b.scores), (mix, id, rows)
                    assert same(a.prompt_scores, b.prompt_scores), (mix, id, rows)


def fresh(made: Engine) -> None:
    """No prefix hits, so that both runs compute the same rows in the same batches."""
    from kvline_server.memory.caches import Caches

    made.caches = made.scheduler.caches = Caches((0,), made.executor.pages, 64)


def test_every_request_gets_exactly_the_entries_it_asked_for(made: Engine) -> None:
    for mix in MIXES:
        fresh(made)
        outputs = run(made, mix, 3)
        for id, kind in enumerate(mix):
            prompt, output = KINDS[kind]
            scored = outputs[id][0].prompt_scores
            wanted = LENGTHS[id] - 1 if prompt is not None else 0
            assert (0 if scored is None else len(scored.values)) == wanted
            if scored is not None:
                assert scored.top_ids.shape == (wanted, prompt)
            for item in outputs[id]:
                assert (item.scores is None) == (output is None)
                if item.scores is not None:
                    assert item.scores.top_ids.shape == (1, output)
                    assert item.scores.tokens[0] == item.tokens[0]


def test_the_head_sees_only_rows_that_are_sampled_or_scored(made: Engine) -> None:
    """Invariant 7."""
    fresh(made)
    before = worker(made).rows_run
    run(made, (2, 0, 3), 100)
    scored = (LENGTHS[0] - 1) + (LENGTHS[2] - 1)
    sampled = 3 * 2
    assert worker(made).rows_run - before == scored + sampled


def test_prompt_cut_into_chunks_and_preempted_scores_once(make_model: Callable[..., Path]) -> None:
    """C3 of upstream's troubles: a partial prompt must neither emit early nor twice."""
    folder = make_model("llama")
    asked = {id: greedy(40, prompt_logprobs=2, seed=id) for id in range(2)}
    prompts = {0: [(3 * i) % 200 for i in range(60)], 1: [(5 * i + 1) % 200 for i in range(40)]}
    roomy, tight = engine(folder, pages=60, step=16), engine(folder, pages=10, step=16)
    results, drawn = [], Drawn(roomy)
    for made in (roomy, tight):
        for id, prompt in prompts.items():
            made.submit(id, list(prompt), asked[id])
        results.append(finish(made))
    assert tight.scheduler.preemptions > 0
    same = []
    for id, prompt in prompts.items():
        one, other = (r[id] for r in results)
        got, want = ([token for o in side for token in o.tokens] for side in (other, one))
        same.append(same_tokens(got, want, asked[id], drawn.logits(asked[id], 40)))
        assert len(one) == len(other) == 40
        assert sum(o.prompt_scores is not None for o in other) == 1
        scored = other[0].prompt_scores
        assert scored is not None
        assert scored.tokens.tolist() == prompt[1:]
        first = one[0].prompt_scores
        assert first is not None
        assert np.allclose(scored.values, first.values, atol=1e-4)
    mostly_same(same, 2 * 40, least=0.5)


def test_ranks_count_from_one(made: Engine) -> None:
    fresh(made)
    outputs = run(made, (2,), 100)
    for item in outputs[0]:
        assert item.scores is not None
        assert item.scores.ranks[0] == 1  # greedy
        assert item.scores.top_ids[0, 0] == item.tokens[0]
        assert item.scores.top_values[0, 0] == item.scores.values[0]
