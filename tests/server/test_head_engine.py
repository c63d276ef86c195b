"""Engines whose draft tokens are a draft head's: they change how many steps an answer takes, and
nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_heads import Reference
from drafted import PAGES, RARE, Outputs, equal
from engines import engine, finish, greedy, worker
from forced_drafts import forced
from hybrid_models import FULL

from kvline_server.engine.engine import Engine
from kvline_server.engine.head import Head, places
from kvline_server.worker.step import Drafting

DRAFTS = 3
NEAR = 1e-4


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Without recurrent layers."""
    return Reference("qwen3.5", layer_types=[FULL] * 4)


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("headed"))


@pytest.mark.parametrize(
    ("right", "pages", "depth", "least", "most"),
    [
        (0.0, max(PAGES), 0, 0.0, 0.0),
        (0.7, min(PAGES), 0, 0.5, 0.8),
        (1.0, max(PAGES), 0, 0.98, 1.0),
        (0.7, min(PAGES), 1, 0.5, 0.8),
    ],
)
def test_drafts_of_a_head_change_no_output(
    folder: Path, right: float, pages: int, depth: int, least: float, most: float
) -> None:
    """None, some and all of them accepted; every option of a request is among them."""

    def make(folder: Path, pages: int, drafts: int, plain: Outputs) -> Engine:
        answers = {id: [t for each in some for t in each.tokens] for id, some in plain.items()}
        head = forced(right, answers)
        return engine(
            folder, pages, running=6, step=64, model_len=180, draft_tokens=drafts, head=head
        )

    found = equal(folder, pages, depth, 40, make, DRAFTS)
    assert found.different <= 1 + found.tokens // RARE
    assert found.drafted > 50 and least <= found.accepted / found.drafted <= most


@pytest.mark.parametrize("step", [20, 512])
def test_drafts_are_those_of_the_reference(folder: Path, reference: Reference, step: int) -> None:
    """Behind prompts that are cut anywhere, beside each other, and behind drafts that were accepted
    or not. Of a tie either may be taken."""
    rng = random.Random(3)
    prompts = [[rng.randrange(290) for _ in range(n)] for n in (1, 2, 15, 16, 17, 40, 70)]
    answers = texts(engine(folder, step=step), prompts)
    head = forced(0.6, answers)
    made = engine(folder, running=3, step=step, draft_tokens=DRAFTS, head=head)
    assert texts(made, prompts) == answers
    assert len(head.offered) > 30 and {len(drafts) for _, drafts in head.offered} == {1, 2, 3}
    for tokens, drafts in head.offered:
        want = reference.behind(tokens, drafts)
        chosen = want.gather(1, torch.tensor(drafts).unsqueeze(1)).squeeze(1)
        assert float((want.amax(1) - chosen).max()) < NEAR * float(want.abs().max())


def texts(made: Engine, prompts: list[list[int]]) -> dict[int, list[int]]:
    for id, prompt in enumerate(prompts):
        made.submit(id, list(prompt), greedy(16))
    return {id: [t for each in some for t in each.tokens] for id, some in finish(made).items()}


def test_a_corrupted_head_changes_no_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all that it keeps, and tokens that are none of its own."""
    prompts = [[(7 * i + n) % 290 for i in range(n)] for n in (3, 20, 33)]
    want = texts(engine(folder), prompts)
    made = engine(folder, draft_tokens=DRAFTS, head=Head)
    run, rng = worker(made).draft, np.random.default_rng(0)
    assert made.head is not None

    def corrupted(drafting: Drafting) -> np.ndarray:
        worker(made).kept[1:].fill_(float("nan"))
        shape = run(drafting).shape
        return rng.integers(0, 300, shape)

    monkeypatch.setattr(made.head, "_run", corrupted)
    assert texts(made, prompts) == want
    speculation = made.speculation
    assert speculation is not None and speculation.drafted > 20
    assert speculation.accepted < 0.2 * speculation.drafted


def test_a_head_s_own_drafts_are_offered_and_rejected(folder: Path) -> None:
    """Its weights are random: that plain decoding's tokens come all the same is the point."""
    prompts = [[(11 * i + n) % 290 for i in range(n)] for n in (5, 64)]
    made = engine(folder, draft_tokens=DRAFTS, head=Head)
    assert texts(made, prompts) == texts(engine(folder), prompts)
    assert made.speculation is not None and made.speculation.drafted > 20


def test_hidden_states_have_a_place_for_each_row_of_a_decode() -> None:
    assert places(5, DRAFTS) == 1 + 5 * (1 + DRAFTS)
