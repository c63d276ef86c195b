"""What `python bench reuse` compares a hybrid with is what an engine over a plain transformer
finds, and what it counts of a hybrid is what its states reach."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import engine
from hybrid_models import build, save

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import reuse

SCALE, TURNS = 0.06, 5  # a system prompt of 240 tokens


@pytest.mark.parametrize("running", [2, 8])
def test_a_plain_transformer_reuses_what_the_arithmetic_says(
    make_model: Callable[..., Path], running: int
) -> None:
    made = engine(make_model("llama"), pages=600, running=running, step=128, model_len=2048)
    played = reuse.agents(5, 200, SCALE, TURNS)
    reuse.play(made, played)
    assert [each.found for each in played[1:]] == [each.plain(240) for each in played[1:]]
    assert played[0].found == [0, *played[0].plain(240)[1:]]
    asked, plain, found = reuse.reused(played, 240)
    assert plain == found < asked
    assert [each.tokens for each in played] == [
        each.prompts[-1] + each.turns[-1][1] for each in played
    ]


def test_a_hybrid_reuses_what_its_states_reach(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save(build("qwen3.5"), tmp_path_factory.mktemp("hybrid"))
    made = engine(folder, pages=600, running=4, step=128, model_len=2048)
    played = reuse.agents(5, 200, SCALE, TURNS)
    reuse.play(made, played)
    _, plain, found = reuse.reused(played, 240)
    states = made.caches.states
    assert states is not None and not made.scheduler.preemptions
    assert found == states.hit
    for each in played:
        assert all(tokens % 64 == 0 for tokens in each.found)
        assert all(np.array(each.found) <= each.plain(240))
    assert 0.8 < found / plain < 1
