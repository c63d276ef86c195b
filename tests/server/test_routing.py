"""What the stress plays in the place of a mixture's routers: from a step to each layer's experts,
and in the stages of a start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import engine, worker
from hypothesis import given
from hypothesis import strategies as st
from test_size import size

from kvline_server.engine.stress.bounds import Bounds
from kvline_server.engine.stress.owners import StressSet
from kvline_server.kernels import torch_experts
from kvline_server.kernels.routing import Played
from kvline_server.kernels.torch_experts import Routes


@given(st.integers(1, 90), st.integers(1, 40), st.data())
def test_experts_share_rows_as_played(rows: int, experts: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, experts))
    logits = torch.randn(rows, experts)

    def counts(how: Played) -> list[int]:
        made = torch_experts.played(logits, chosen, how)
        ids = torch_experts.route(made, chosen, True).ids
        assert all(len(set(row)) == chosen for row in ids.tolist())
        return ids.flatten().bincount(minlength=experts).tolist()

    assert torch_experts.played(logits, chosen, Played.NOTHING) is logits
    assert sorted(counts(Played.UNEQUAL)) == [0] * (experts - chosen) + [rows] * chosen
    even = counts(Played.EVEN)
    assert sum(even) == rows * chosen and max(even) - min(even) <= 1


def test_a_step_s_routing_is_that_of_every_layer_and_of_no_other_step(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker(engine(make_model("qwen3-moe")))  # 3 of 11 experts
    met: list[torch.Tensor] = []

    def routed(logits: torch.Tensor, chosen: int, renormalise: bool) -> Routes:
        routes = route(logits, chosen, renormalise)
        met.append(routes.ids.flatten().bincount(minlength=11))
        return routes

    route = torch_experts.route
    monkeypatch.setattr(torch_experts, "route", routed)
    bounds = Bounds(
        max_running_requests=8,
        max_prefill_tokens=44,
        max_top_logprobs=0,
        max_model_len=512,
        vocabulary=made.decoder.config.vocabulary,
        windows=(0,),
        pages=(200,),
        logprob_rows=16,
    )
    unequal, even = list(StressSet.of(made).plays(bounds))[:2]
    (plain, *_) = StressSet().plays(bounds)
    assert {play.name for play in (unequal, even, plain)} == {"prefill-one"}
    for how, play in zip(
        (Played.UNEQUAL, Played.EVEN, Played.NOTHING), (unequal, even, plain), strict=True
    ):
        met.clear()
        batch = play.make()
        assert batch.step.routing is how
        made.launch(batch.step).wait()
        *every, last = met  # of the last layer the LM head's rows alone count
        assert len(every) == made.decoder.config.layers - 1 > 0
        for counts in every:
            same = counts.tolist() == [44] * 3 + [0] * 8
            alike = counts.tolist() == [12] * 11
            assert (same, alike) == (how is Played.UNEQUAL, how is Played.EVEN)
        assert (last > 0).sum() == 3 if how is Played.UNEQUAL else (last > 0).sum() > 3


@pytest.mark.process
def test_a_start_is_stressed_with_both(
    make_model: Callable[..., Path],
) -> None:
    report = json.loads(size(make_model("mixtral"), "--json").stdout)
    stresses = [s for s in report["stages"] if s["name"] in ("stress", "validate")]
    assert len(stresses) == 2
    for stage in stresses:
        assert stage["detail"].startswith("6 steps, the longest "), stage
        assert "every row to the same experts" in stage["detail"], stage
        assert "rows to all experts alike" in stage["detail"], stage
