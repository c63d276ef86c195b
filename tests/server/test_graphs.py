"""Captured graphs on the CPU, by a stand-in for CUDA's: what a graph holds runs again at each
replay, over the same buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import engine, finish, greedy, worker
from stand_ins import CapturedKernels, Pool

from kvline_server.engine.engine import Engine
from kvline_server.kernels.row_counts import captured
from kvline_server.worker.graphs import graphs, steps
from kvline_server.worker.inputs import upload
from kvline_server.worker.step import InFlight, Step

MOST, RUNNING = 48, 6


@pytest.fixture(params=list(itertools.product(["qwen2", "gemma3"], [0, 3])), ids=str)
def with_graphs(
    request: pytest.FixtureRequest, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Pool]:
    """Of layers alike, and of two groups, of which one has a window; plain, and with so many draft
    tokens."""
    name, drafts = request.param
    options = {"running": RUNNING, "step": MOST, "draft_tokens": drafts}
    made = engine(make_model(name), kernels=CapturedKernels(), **options)
    pool, inputs = Pool(), steps._Inputs
    monkeypatch.setattr(graphs, "GraphPool", lambda: pool)
    # Nothing is pinned here.
    monkeypatch.setattr(steps, "_Inputs", lambda rows, pages, **_: inputs(rows, pages))
    assert made.executor.capture(MOST, 512)
    return made, pool


def serve(made: Engine) -> None:
    """Requests of which some are decoded while prompts of others are chunked."""
    for id, length in enumerate((1, 2, 17, 33, 61, 100, 5, 48)):
        more = 40 if made.speculation is not None else 0
        params = greedy(4 + id + more, **({"prompt_logprobs": 1} if id == 3 else {}))
        made.submit(id, [(7 * id + i) % 300 for i in range(length)], params)
    assert len(finish(made)) == 8


def test_graphs_give_the_hidden_states_of_steps_without(
    with_graphs: tuple[Engine, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, pool = with_graphs
    runner = worker(made)
    decoder, found = runner.decoder, runner.graphs
    assert found is not None
    rows = captured(found.whole.max_rows)
    assert len(found.whole.stagings) == made.executor.depth + 1
    assert pool.captured == len(captured(MOST)) * (decoder.config.layers + 1) + len(rows)
    run, kinds, drafted = found.run, set[tuple[bool, int]](), set[tuple[bool, bool]]()

    def compared(step: Step) -> torch.Tensor:
        got = run(step)
        ids, mapping, logits_indices = upload(decoder, step, runner.last_tokens)
        want = decoder.step(ids, mapping, runner.arena.layers(), step.layout, logits_indices)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        kinds.add((found.whole.fits(step), len(step.pending_rows) > 0))
        drafted.add((found.whole.fits(step), step.layout.decode_rows > step.layout.decodes))
        return got

    monkeypatch.setattr(found, "run", compared)
    serve(made)
    assert kinds >= {(True, True), (False, True), (False, False)}
    assert ({(True, True), (False, True)} <= drafted) == (made.speculation is not None)


def test_a_rehearsal_replays_no_graph(
    with_graphs: tuple[Engine, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for ranks that rehearse by themselves."""
    made, pool = with_graphs
    launch = made.executor.launch

    def rehearsed(step: Step) -> InFlight:
        before = pool.replayed
        worker(made).rehearse(step)
        assert pool.replayed == before
        launched = launch(step)
        assert pool.replayed > before
        return launched

    monkeypatch.setattr(made.executor, "launch", rehearsed)
    serve(made)
