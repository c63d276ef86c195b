"""Captured graphs of hybrids, by stand-ins: segments between mixers of every
kind, and whole steps, whose slots are read where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import decoder
from hybrid_models import FULL, LINEAR, Runner, Work, build, save
from stand_ins import CapturedKernels, Pool

from kvline_server.kernels.layout import SamplingMetadata
from kvline_server.kernels.recurrent import DUMMY, Sequences
from kvline_server.kernels.torch_recurrent import TorchRecurrent
from kvline_server.worker.graphs import graphs, steps
from kvline_server.worker.graphs.graphs import Graphs
from kvline_server.worker.step import Step

MOST, COUNT = 96, 6


@dataclass
class Held:
    """A plan of one row a sequence, whose slots are read when it runs."""

    slots: torch.Tensor
    sources: torch.Tensor

    def sequences(self) -> Sequences:
        starts = np.arange(len(self.slots) + 1, dtype=np.int32)
        return Sequences(starts, self.slots.numpy(), self.sources.numpy())


class InPlace(TorchRecurrent):
    def plan_in_place(  # type: ignore[override]
        self, slots: torch.Tensor, sources: torch.Tensor
    ) -> Held:
        return Held(slots, sources)

    def delta_rule(self, *words: Any) -> torch.Tensor:
        return super().delta_rule(*self._planned(words))

    def scan(self, *words: Any) -> torch.Tensor:
        return super().scan(*self._planned(words))

    def _planned(self, words: Sequence[Any]) -> list[Any]:
        return [self.plan(each.sequences()) if isinstance(each, Held) else each for each in words]


def kernels() -> CapturedKernels:
    made = CapturedKernels()
    made.recurrent = InPlace(made.device)
    return made


@dataclass
class Arena:
    """As GroupedArena, of a runner's memories."""

    runner: Runner

    def layers(self) -> list[Any]:
        return self.runner.memories


def step_of(runner: Runner, work: Sequence[Work]) -> Step:
    """With the last row of each sequence sampled."""
    layout = runner.layout(work)
    last, none = layout.row_starts[1:].astype(np.int64) - 1, np.zeros(0, np.int64)
    some = np.ones(len(work), np.float32)
    metadata = SamplingMetadata(
        some, np.zeros(len(work), np.int32), some, some, np.ones(len(work), np.uint64)
    )
    return Step(
        tokens=np.array([token for each in work for token in each.tokens]),
        layout=layout,
        pending_rows=none,
        pending_requests=none,
        logits_indices=last,
        targets=none,
        scored_top=0,
        sampled_requests=np.arange(len(work)),
        sampling_metadata=metadata,
        listed=none,
        listed_top=0,
    )


# Of two kinds of mixers each, one of which is last and has a gate; and without experts, of which
# graphs on a CPU have none.
ENDS = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL], "num_hidden_layers": 5}
CASES = [("qwen3.5", {}), ("qwen3.5", ENDS), ("granite", {}), ("nemotron-h-dense", {})]


@pytest.mark.parametrize(("name", "more"), CASES)
def test_graphs_give_the_hidden_states_of_steps_without(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(build(name, **more), tmp_path)
    pool, inputs = Pool(), steps._Inputs
    monkeypatch.setattr(graphs, "GraphPool", lambda: pool)
    monkeypatch.setattr(steps, "_Inputs", lambda rows, pages, **_: inputs(rows, pages))
    plain, captured = (Runner(decoder(folder, kernels=kernels()), COUNT) for _ in range(2))
    plan, last = captured.decoder.kernels.attention.plan_in_place, torch.zeros(COUNT).long()
    assert plan is not None
    arena: Any = Arena(captured)
    made = Graphs(captured.decoder, plan, arena, last, COUNT, MOST, 256)
    random, whole = np.random.default_rng(3), 0
    for count in (3, 2, 3, 4, 4, 1, 3):
        own = [Work(i, random.integers(0, 250, 1).tolist()) for i in range(count) if plain.done[i]]
        new = [i for i in range(COUNT) if not plain.done[i]][: count - len(own)]
        own += [Work(i, random.integers(0, 250, 17 + i).tolist()) for i in new]
        step = step_of(plain, own)
        whole += made.whole.fits(step)
        with torch.inference_mode():
            got = made.run(step).clone()
        want = plain.run(own)
        for one, rows in zip(captured.decoder.compute_logits(got), want, strict=True):
            torch.testing.assert_close(one, rows[-1], rtol=1e-4, atol=1e-4)
        for each in own:
            captured.done[each.sequence] += len(each.tokens)
    assert whole == 5 and pool.replayed > whole


def test_a_step_with_drafts_is_no_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are no sequences of their own: a state goes on from row to row."""
    runner = Runner(decoder(save(build("qwen3.5"), tmp_path)), COUNT)
    whole = object.__new__(steps.WholeSteps)
    whole.max_rows = MOST
    step = step_of(runner, [Work(0, [5])])
    assert not whole.fits(step)  # it begins
    runner.run([Work(0, [5])])
    drafted = step_of(runner, [Work(0, [6, 7])])
    drafted = replace(drafted, layout=replace(drafted.layout, decodes=1))
    sampled = replace(drafted, sampled_requests=np.arange(2))
    assert sampled.layout.decode_rows == 2 and not whole.fits(sampled)
    step = step_of(runner, [Work(0, [6])])
    assert whole.fits(step) and step.layout.apart() is step.layout
    assert step.layout.states is not None and step.layout.states.sources[0] != DUMMY
