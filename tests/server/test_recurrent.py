"""Recurrent layers in plain torch: the gated delta rule and Mamba2's scan against float64, cut and
packed in every way, with slots that hold NaN wherever nothing may be read.

Decays are spread: with those of a library's random weights a lost state is invisible (9e-8)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from float64_recurrent import expected, sequences
from recurrent_layers import KERNELS, NAN, SLOTS, Model, delta_rule, fresh, scan

from kvline_server.kernels import torch_recurrent
from kvline_server.kernels.projection import Norm
from kvline_server.kernels.recurrent import (
    CHUNK,
    DUMMY,
    Convolution,
    Decay,
    DeltaRule,
    States,
)

LENGTHS = (1, 3, 4, 63, 64, 65, 130)  # around the convolution and the chunks


@pytest.fixture(params=[delta_rule, scan], ids=["delta", "scan"])
def model(request: pytest.FixtureRequest) -> Model:
    return fresh(request.param)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within 1e-5 of the largest."""
    off = (got.double() - want).abs().max() / want.abs().max()
    assert float(off) < 1e-5, off


def same(model: Model, slot: int, want: tuple[torch.Tensor, ...], got: torch.Tensor) -> None:
    near(got, want[0])
    assert torch.equal(model.states.inputs[slot].double(), want[1])
    near(model.states.matrices[slot], want[2])


@pytest.mark.parametrize("rows", LENGTHS)
def test_a_prompt_is_as_in_float64_wherever_it_is_cut(rows: int, model: Model) -> None:
    want = model.want(rows)
    for cuts in (
        [rows],
        *([at, rows] for at in (1, 2, 3, 4, 5, 63, 64, 65, 66, 67, 129) if at < rows),
        [*range(5, rows, 5), rows],
        [*range(3, rows, 3), rows],
        [at for at in (64, 65, 68, 127, 128, 129) if at < rows] + [rows],
        range(1, rows + 1),
    ):
        same(model, 1, want, model.cut(rows, cuts, 1))
    others = [slot for slot in range(SLOTS) if slot != 1]
    assert model.states.inputs[others].isnan().all()
    assert model.states.matrices[others].isnan().all()


def test_what_is_computed_at_once_is_what_is_computed_row_by_row(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for short in (0, CHUNK):
        monkeypatch.setattr(torch_recurrent, "SHORT", short)
        for rows in LENGTHS:
            same(model, 1, model.want(rows), model.cut(rows, [rows], 1))


def test_a_state_is_not_forgotten(model: Model) -> None:
    """What another first row changes 60 rows later is far above all tolerances here."""
    x, gates = model.inputs(64)
    before, _, _ = expected(model.layer, x, gates)
    changed = x.clone()
    changed[0] += 1
    after, _, _ = expected(model.layer, changed, gates)
    assert (after - before)[-4:].abs().max() / before.abs().max() > 1e-3


def test_a_sequence_has_the_same_bits_alone_and_among_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever order they are in; some go on from their slots, others begin in slots of NaN."""
    counts = [*LENGTHS, 1, 9, 1, 8]
    for slot in range(1, SLOTS):
        if slot % 3:
            model.cut(40, [40], slot, seed=slot)
    pool = States(model.states.inputs.clone(), model.states.matrices.clone())
    steps = [(count, slot, slot % 3 > 0) for slot, count in enumerate(counts, 1)]
    x, gates = model.inputs(sum(counts), seed=99)
    ends = np.cumsum(counts)
    own = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    alone = [model.run(x[at], gates[at], [step]) for at, step in zip(own, steps, strict=True)]
    kept = model.states
    for at_once in (1, 4000, 1 << 20):
        monkeypatch.setattr(torch_recurrent, "AT_ONCE", at_once)
        monkeypatch.setattr(torch_recurrent, "FILTERED", at_once)
        for order in (range(len(steps)), np.random.default_rng(0).permutation(len(steps))):
            model.states = States(pool.inputs.clone(), pool.matrices.clone())
            rows, more = (torch.cat([each[own[i]] for i in order]) for each in (x, gates))
            got = model.run(rows, more, [steps[i] for i in order])
            assert torch.equal(got, torch.cat([alone[i] for i in order]))
            assert torch.equal(model.states.inputs[1:], kept.inputs[1:])
            assert torch.equal(model.states.matrices[1:], kept.matrices[1:])


@pytest.mark.parametrize("rows", [65, 72, 73, 130, 200])
def test_a_prompt_has_the_same_bits_whole_and_resumed_at_a_chunk(rows: int, model: Model) -> None:
    whole = model.cut(rows, [rows], 1)
    for at in range(CHUNK, rows, CHUNK):
        assert torch.equal(model.cut(rows, [at, rows], 2), whole)
        assert torch.equal(model.states.matrices[2], model.states.matrices[1])
        assert torch.equal(model.states.inputs[2], model.states.inputs[1])


@pytest.mark.parametrize("rows", [64, 65, 128, 200])
def test_a_snapshot_is_the_state_at_a_chunk_and_is_read_without_a_copy(
    rows: int, model: Model
) -> None:
    """Written in passing of a step of many sequences; two others read it at once, and leave it."""
    x, gates = model.inputs(rows)
    more = model.inputs(100, seed=5)
    both = torch.cat((more[0], x)), torch.cat((more[1], gates))
    kept = [(1, at, 5 + at // CHUNK) for at in range(CHUNK, rows + 1, CHUNK)]
    kept.append((0, CHUNK, 9))
    whole = model.run(*both, [(100, 1, False), (rows, 2, False)], kept)[100:]
    assert torch.equal(whole, model.cut(rows, [rows], 3))
    for at in range(CHUNK, rows + 1, CHUNK):
        slot = 5 + at // CHUNK
        model.cut(at, [at], 4)
        for pool in (model.states.inputs, model.states.matrices):
            assert torch.equal(pool[slot], pool[4])
        left = rows - at
        if left:
            twice = torch.cat((x[at:], x[at:])), torch.cat((gates[at:], gates[at:]))
            resumed = model.run(*twice, [(left, 3, slot), (left, 4, slot)])
            assert torch.equal(resumed, torch.cat((whole[at:], whole[at:])))
            assert torch.equal(model.states.matrices[4], model.states.matrices[2])
    model.cut(CHUNK, [CHUNK], 4, seed=5)
    assert torch.equal(model.states.matrices[9], model.states.matrices[4])
    assert model.states.matrices[10:].isnan().all() and model.states.inputs[10:].isnan().all()


def test_draft_tokens_have_the_bits_of_decodes(model: Model) -> None:
    one, four = ([*range(20, 33, step)] for step in (1, 4))
    assert torch.equal(model.cut(32, one, 1), model.cut(32, four, 2))
    assert torch.equal(model.states.matrices[1], model.states.matrices[2])


def test_padding_is_finite_and_stays_in_the_dummy_slot(model: Model) -> None:
    """Sequences of padding all have its slot and may ask for it to be read; rows behind the last
    sequence have none."""
    x, gates = model.inputs(20)
    alone = model.run(x[:9], gates[:9], [(9, 2, False)])
    kept = model.states.matrices[2].clone()
    padding = [(1, DUMMY, carried) for carried in (False, True, True)]
    for _ in range(2):
        got = model.run(x, gates, [(9, 3, False), *padding])
        assert torch.equal(got[:9], alone) and torch.equal(model.states.matrices[3], kept)
        assert got.isfinite().all() and not got[12:].any()
        assert model.states.matrices[DUMMY].isfinite().all()
        assert model.states.inputs[DUMMY].isfinite().all()
    assert model.states.matrices[4:].isnan().all() and model.states.inputs[4:].isnan().all()


def test_slots_go_from_sequence_to_sequence(model: Model) -> None:
    """Random chunks of sequences that end at different times; a freed slot is filled with NaN."""
    rng = np.random.default_rng(0)
    running: dict[int, tuple[int, int, int]] = {}  # by slot: length, seed, done
    outputs: dict[int, list[torch.Tensor]] = {}
    ended = 0
    for seed in range(40):
        for slot in range(1, 6):
            if slot not in running and rng.random() < 0.4:
                running[slot] = int(rng.choice([2, 3, 5, 20, 70])), 10 * seed + slot, 0
                outputs[slot] = []
        chosen = [slot for slot in running if rng.random() < 0.8]
        if not chosen:
            continue
        steps, parts = [], []
        for slot in rng.permutation(chosen).tolist():
            rows, own, done = running[slot]
            count = min(int(rng.choice([1, 1, 2, 4, 9, 64])), rows - done)
            steps.append((count, slot, done > 0))
            parts.append([each[done : done + count] for each in model.inputs(rows, own)])
            running[slot] = rows, own, done + count
        x, gates = (torch.cat(each) for each in zip(*parts, strict=True))
        made = model.run(x, gates, steps)
        for (_, slot, _), one in zip(steps, torch.split(made, [s[0] for s in steps]), strict=True):
            outputs[slot].append(one)
            rows, own, done = running[slot]
            if done == rows:
                same(model, slot, model.want(rows, own), torch.cat(outputs[slot]))
                model.states.inputs[slot] = model.states.matrices[slot] = NAN
                del running[slot]
                ended += 1
    assert ended > 15


def test_a_state_may_be_in_bfloat16(model: Model) -> None:
    """Rounded at every step: near, and not the same."""
    states = model.states
    model.states = States(states.inputs, states.matrices.bfloat16())
    got, (want, _, matrices) = model.cut(64, range(1, 65), 1), model.want(64)
    assert 1e-5 < (got.double() - want).norm() / want.norm() < 2e-2
    kept = model.states.matrices[1].double()
    assert (kept - matrices).norm() / matrices.norm() < 2e-2


def test_a_state_in_bfloat16_never_forgets_what_decays_slowly(model: Model) -> None:
    """Rows of zeros change nothing but by the decay. One nearer to 1 than half the distance of two
    numbers, 2^-9, is rounded away, row by row: sums then grow without end. float32 keeps it."""
    rows, slow = 300, torch.full((6,), 0.001).log()
    weight = Convolution(model.layer.convolution.weight)  # a bias would add to the state
    layer = replace(model.layer, convolution=weight, decay=Decay(slow, torch.full((6,), 0.5413)))
    model.layer = layer
    x, gates = model.inputs(rows)
    x[4:], gates[4:] = 0, 0
    want = expected(layer, x, gates)[2]
    for dtype, kept in ((torch.float32, 1.0), (torch.bfloat16, 1.3)):
        model.states = States(model.states.inputs, model.states.matrices.to(dtype))
        for at in range(rows):
            model.run(x[at : at + 1], gates[at : at + 1], [(1, 1, at > 0)])
        grown = model.states.matrices[1].double().norm() / want.norm()
        assert abs(float(grown) - kept) < 0.06, grown


def test_in_bfloat16_a_delta_rule_corrects_itself_and_a_scan_does_not(model: Model) -> None:
    """With decays of 0.999 each: why the one is served in it and the other is refused."""
    slow, parts = torch.full((6,), 0.001).log(), (128, 512)
    model.layer = replace(model.layer, decay=Decay(slow, torch.full((6,), 0.5413)))
    model.states = States(model.states.inputs, model.states.matrices.bfloat16())
    x, gates = model.inputs(parts[-1])
    delta = isinstance(model.layer, DeltaRule)
    gates[:, 6 if delta else 0 :] = 0
    off = []
    for at in range(parts[-1]):
        model.run(x[at : at + 1], gates[at : at + 1], [(1, 1, at > 0)])
        if at + 1 in parts:
            want = expected(model.layer, x[: at + 1], gates[: at + 1])[2]
            off.append(float((model.states.matrices[1].double() - want).norm() / want.norm()))
    early, late = off
    if delta:
        assert late < 1.3 * early and late < 1.2e-2, off
    else:
        assert late > 4 * early and late > 4e-2, off


def test_a_state_in_bfloat16_has_the_same_bits_wherever_chunks_are_cut() -> None:
    """And in a batch: it is rounded where a chunk ends, whole or resumed, alone or not."""
    model, rows = fresh(delta_rule), 200
    model.states = States(model.states.inputs, model.states.matrices.bfloat16())
    whole = model.cut(rows, [rows], 1)
    for at in range(CHUNK, rows, CHUNK):
        assert torch.equal(model.cut(rows, [at, rows], 2), whole)
        assert torch.equal(model.states.matrices[2], model.states.matrices[1])
    x, gates = model.inputs(rows)
    others = [model.inputs(count, seed=count) for count in (70, 1, 9)]
    packed, more = (torch.cat(each) for each in zip((x, gates), *others, strict=True))
    steps = [(rows, 3, False), (70, 4, False), (1, 5, False), (9, 6, False)]
    got = model.run(packed, more, steps, [(0, 128, 7)])
    assert torch.equal(got[:rows], whole)
    assert torch.equal(model.states.matrices[3], model.states.matrices[1])
    assert torch.equal(model.run(x[128:], gates[128:], [(rows - 128, 8, 7)]), whole[128:])


def test_results_are_in_the_dtype_of_the_rows_and_where_they_are_asked_for(model: Model) -> None:
    x, gates = model.inputs(70)
    rows = [each.bfloat16() for each in (x, gates)]
    want = expected(model.layer, *(each.double() for each in rows))[0]
    into = torch.full((70, want.shape[1] + 5), NAN, dtype=torch.bfloat16)[:, 2:-3]
    plan = KERNELS.plan(sequences([(70, 1, False)]))
    run = KERNELS.delta_rule if isinstance(model.layer, DeltaRule) else KERNELS.scan
    got = functools.partial(run, *rows)(model.layer, model.states, plan, into)  # type: ignore[arg-type]
    assert got is into and (got.double() - want).norm() / want.norm() < 5e-3


def test_gated_norms_have_their_own_orders() -> None:
    """Behind a delta rule the norm of each head, then the gate; behind a scan the gate, then the
    norm of each group."""
    torch.manual_seed(0)
    x, gate = torch.randn(5, 24), torch.randn(5, 24) * 3
    heads, weight, whole = x.double().view(5, 3, 8), torch.randn(8), torch.randn(24)

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    for name, activate in (("silu", torch.nn.functional.silu), ("sigmoid", torch.sigmoid)):
        got = KERNELS.norm_then_gate(x, gate, Norm(weight, 1e-3), name)
        near(got, (rms(heads) * weight).flatten(1) * activate(gate.double()))
    gated = x.double() * torch.nn.functional.silu(gate.double())
    for groups in (1, 2):
        got = KERNELS.gate_then_norm(x, gate, Norm(whole, 1e-3), groups)
        near(got, rms(gated.view(5, groups, -1)).flatten(1) * whole)
