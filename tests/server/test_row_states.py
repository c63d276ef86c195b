"""Draft tokens of models with recurrent layers: a state is written behind each row of a decode, and
the next step goes on from that of the last accepted one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_heads import Reference
from drafted import PAGES, RARE, Outputs, equal
from engines import engine, finish, greedy, spoil, worker
from float64_recurrent import sequences
from forced_drafts import forced, knowing
from hybrid_models import build, save
from recurrent_layers import delta_rule, fresh, scan

from kvline_server.engine.engine import Engine
from kvline_server.kernels.recurrent import DeltaRule, Scan
from kvline_server.memory.state_shape import States

DRAFTS, REQUESTS = 3, 25
NEAR = 1e-5
FAMILIES = ("qwen3.5", "nemotron-h")  # a delta rule, and a scan


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: str) -> Path:
        into = tmp_path_factory.mktemp(family)
        return Reference(family).save(into) if family == "qwen3.5" else save(build(family), into)

    return make


@pytest.mark.parametrize("kind", [delta_rule, scan])
def test_a_state_behind_each_row_is_that_of_steps_of_one(
    kind: Callable[[], DeltaRule | Scan],
) -> None:
    """To the bit, beside a prompt and a decode of one row; slots that are not written keep what
    they have."""
    counts, prompt = (1, 4, 2), 70
    before = {0: 5, 1: 66, 2: 1}  # rows that each has already; slots 1 to 3
    drafted, stepped = fresh(kind), fresh(kind)
    rows = [drafted.inputs(before[i] + counts[i], i) for i in range(3)]
    new = drafted.inputs(prompt, 9)
    for model in (drafted, stepped):
        for i, (x, gates) in enumerate(rows):
            model.run(x[: before[i]], gates[: before[i]], [(before[i], 1 + i, False)])
    ends = [(each[0][before[i] :], each[1][before[i] :]) for i, each in enumerate(rows)]
    x, gates = (torch.cat([each[at] for each in (*ends, new)]) for at in (0, 1))
    steps = sequences([(1, 1, True), (4, 7, 2), (2, 8, 3), (prompt, 4, False)], [(3, 64, 9)])
    each = np.array([1, 2, 5, 6, 7, 3, 8])
    got = drafted.step(x, gates, replace(steps, each=each))
    want = []
    written = {0: (1,), 1: (2, 5, 6, 7), 2: (3, 8)}
    for i, (own, gate) in enumerate(ends):
        source = 1 + i
        for row, slot in enumerate(written[i]):
            step = [(1, slot, source)]
            want.append(stepped.run(own[row : row + 1], gate[row : row + 1], step))
            source = slot
    want.append(stepped.run(*new, [(prompt, 4, False)], [(0, 64, 9)]))
    assert torch.equal(got, torch.cat(want))
    for one, other in zip(
        (drafted.states.inputs, drafted.states.matrices),
        (stepped.states.inputs, stepped.states.matrices),
        strict=True,
    ):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("right", "pages", "depth"),
    [(0.0, 200, 0), (0.7, min(PAGES), 0), (1.0, 200, 0), (0.7, min(PAGES), 1)],
)
def test_drafts_of_hybrids_change_no_output(
    folder_of: Callable[[str], Path], family: str, right: float, pages: int, depth: int
) -> None:
    """None, some and all accepted, with every option, of as many sequences as there are states for;
    some are preempted and others leave while their drafts are in a step."""

    def make(folder: Path, pages: int, drafts: int, plain: Outputs) -> Engine:
        made = engine(
            folder, pages, running=6, step=96, model_len=180, draft_tokens=drafts, drafting=2
        )
        return knowing(made, right, answers_of(plain))

    found = equal(folder_of(family), pages, depth, REQUESTS, make, DRAFTS)
    assert found.different <= 1 + found.tokens // RARE
    assert found.drafted > 50 and abs(found.accepted / found.drafted - right) < 0.25


@pytest.mark.parametrize(("right", "depth"), [(0.0, 0), (0.7, 1), (1.0, 0)])
def test_drafts_of_a_hybrid_s_head_change_no_output(
    folder_of: Callable[[str], Path], right: float, depth: int
) -> None:
    def make(folder: Path, pages: int, drafts: int, plain: Outputs) -> Engine:
        head = forced(right, answers_of(plain))
        return engine(
            folder, pages, running=6, step=96, model_len=180, draft_tokens=drafts, head=head
        )

    found = equal(folder_of("qwen3.5"), min(PAGES), depth, REQUESTS, make, DRAFTS)
    assert found.different <= 1 + found.tokens // RARE
    assert found.drafted > 50 and abs(found.accepted / found.drafted - right) < 0.25


def answers_of(plain: Outputs) -> dict[int, list[int]]:
    return {id: [t for each in some for t in each.tokens] for id, some in plain.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_a_sequence_goes_on_from_the_state_of_plain_decoding(
    folder_of: Callable[[str], Path], family: str, right: float
) -> None:
    """After each step, over boundaries at which states are kept for others, with NaN in every slot
    that nobody has."""
    prompt = [3 + (7 * i * i) % 290 for i in range(50)]
    known: dict[int, list[torch.Tensor]] = {}
    plain = engine(folder_of(family), step=96)
    answer = play(plain, prompt, lambda computed, states: known.setdefault(computed, states))
    made = engine(folder_of(family), step=96, draft_tokens=DRAFTS)
    compared = []

    def compare(computed: int, states: list[torch.Tensor]) -> None:
        for got, want in zip(states, known[computed], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=NEAR * float(want.abs().max()))
        compared.append(computed)

    assert play(knowing(made, right, {0: answer}), prompt, compare) == answer
    assert len(compared) < len(known) if right else len(compared) == len(known)
    states, others = made.caches.states, plain.caches.states
    assert states is not None and others is not None
    assert states._of.keys() == others._of.keys()  # what is found of the prompt, and of the answer


def play(
    made: Engine, prompt: list[int], note: Callable[[int, list[torch.Tensor]], object]
) -> list[int]:
    made.submit(0, list(prompt), greedy(90))
    tokens: list[int] = []
    while not made.idle:
        tokens += [t for each in made.step() for t in each.tokens]
        made.caches.check([each.table for each in made.scheduler.running])
        spoil(made)
        for sequence in made.scheduler.running:
            own = sequence.table.states
            assert own is not None
            layers = [each for each in worker(made).arena.layers() if isinstance(each, States)]
            slots = [part[own.slot] for each in layers for part in (each.inputs, each.matrices)]
            note(sequence.computed, [each.clone() for each in slots])
    assert finish(made) == {}
    return tokens
