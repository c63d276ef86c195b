"""Recurrent layers on a GPU: our kernels in bfloat16 against float64, in mixed steps against the
CPU's, with slots that hold NaN wherever nothing may be read.

Decays are spread: with those of a library's random weights a lost state is invisible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from float64_recurrent import Step, expected, sequences

from kvline_server.kernels.cuda_recurrent import CudaRecurrent
from kvline_server.kernels.projection import Norm
from kvline_server.kernels.recurrent import (
    CHUNK,
    DUMMY,
    Convolution,
    Decay,
    DeltaRule,
    Scan,
    States,
)
from kvline_server.kernels.torch_recurrent import TorchRecurrent

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 4, 8, 9, 16, 17, 63, 64, 65, 130)  # around convolution, tiles and chunks
NAN, SLOTS, PAD = float("nan"), 16, 16
OFF = 6e-3  # of outputs and states: operands of GEMMs are in bfloat16


def spread(count: int) -> torch.Tensor:
    return torch.linspace(-3, 1, count, device="cuda")[torch.randperm(count, device="cuda")]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def delta_rule() -> DeltaRule:
    """Three value heads a key head."""
    made = Convolution(bf16((2 * 2 + 6) * 128, 4) / 2)
    return DeltaRule(2, 6, 128, 128, made, Decay(spread(6), spread(6)))


def scan() -> Scan:
    """Two groups of four heads, with biases."""
    channels = 8 * 64 + 2 * 2 * 128
    made = Convolution(bf16(channels, 4) / 2, bf16(channels))
    skip = torch.randn(8, device="cuda")
    return Scan(8, 64, 2, 128, made, Decay(spread(8), spread(8)), skip)


@dataclass
class Model:
    """A layer with its pool, of which no slot may be read yet."""

    layer: DeltaRule | Scan
    states: States
    kernels: CudaRecurrent

    @property
    def gates(self) -> int:
        layer = self.layer
        return 2 * layer.value_heads if isinstance(layer, DeltaRule) else layer.heads

    def inputs(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ones are the same for all lengths. Strided, as parts of one GEMM's output."""
        torch.manual_seed(1 + seed)
        channels = len(self.layer.convolution.weight)
        made = [bf16(1, channels + PAD) for _ in range(rows)]
        both = torch.cat(made)
        return both[:, :channels], both[:, channels : channels + self.gates]

    def run(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        steps: Sequence[Step],
        kept: Sequence[tuple[int, int, int]] = (),
    ) -> torch.Tensor:
        return self.planned(x, gates, self.kernels.plan(sequences(steps, kept)))

    def planned(self, x: torch.Tensor, gates: torch.Tensor, plan: object) -> torch.Tensor:
        if isinstance(self.layer, DeltaRule):
            return self.kernels.delta_rule(x, gates, self.layer, self.states, plan)  # type: ignore[arg-type]
        return self.kernels.scan(x, gates, self.layer, self.states, plan)  # type: ignore[arg-type]

    def cut(self, rows: int, cuts: Sequence[int], slot: int, seed: int = 0) -> torch.Tensor:
        """A sequence in chunks that end at `cuts`."""
        x, gates = self.inputs(rows, seed)
        made, at = [], 0
        for end in cuts:
            steps = [(end - at, slot, slot if at else DUMMY)]
            made.append(self.run(x[at:end], gates[at:end], steps))
            at = end
        return torch.cat(made)

    def want(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return expected(self.layer, *(each.double() for each in self.inputs(rows, seed)))


def fresh(kind: Callable[[], DeltaRule | Scan], dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    layer = kind()
    shape = (6, 128, 128) if isinstance(layer, DeltaRule) else (8, 64, 128)
    channels = len(layer.convolution.weight)
    inputs = torch.full((SLOTS, 3, channels), NAN, dtype=torch.bfloat16, device="cuda")
    matrices = torch.full((SLOTS, *shape), NAN, dtype=dtype, device="cuda")
    return Model(layer, States(inputs, matrices), CudaRecurrent(torch.device("cuda")))


@pytest.fixture(params=[delta_rule, scan], ids=["delta", "scan"])
def model(request: pytest.FixtureRequest) -> Model:
    return fresh(request.param)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def near(got: torch.Tensor, want: torch.Tensor, most: float = OFF) -> None:
    assert off(got, want) < most, off(got, want)


def same(model: Model, slot: int, want: tuple[torch.Tensor, ...], got: torch.Tensor) -> None:
    near(got, want[0])
    assert torch.equal(model.states.inputs[slot].double(), want[1])
    near(model.states.matrices[slot], want[2])


def untouched(model: Model, slots: list[int]) -> None:
    assert model.states.inputs[slots].isnan().all()
    assert model.states.matrices[slots].isnan().all()


@pytest.mark.parametrize("rows", LENGTHS)
def test_a_prompt_is_as_in_float64_wherever_it_is_cut(rows: int, model: Model) -> None:
    want = model.want(rows)
    for cuts in (
        [rows],
        *([at, rows] for at in (1, 2, 3, 5, 9, 63, 64, 65, 129) if at < rows),
        [*range(5, rows, 5), rows],
        [at for at in (64, 65, 68, 127, 128, 129) if at < rows] + [rows],
        range(1, rows + 1),
    ):
        same(model, 1, want, model.cut(rows, cuts, 1))
    untouched(model, [slot for slot in range(SLOTS) if slot != 1])


def test_decodes_leave_the_state_of_float32(model: Model) -> None:
    """Row by row nothing but the output is rounded."""
    want, _, matrices = model.want(40)
    near(model.cut(40, range(1, 41), 1), want, 3e-3)
    near(model.states.matrices[1], matrices, 3e-6)


def test_a_mixed_step_is_that_of_the_cpu(model: Model) -> None:
    """Decodes, drafts and prompts in any order, some of which go on; padding rows hold NaN."""
    counts = [*LENGTHS, 1, 1, 5]
    for slot in range(1, len(counts) + 1):
        if slot % 3:
            model.cut(40, [40], slot, seed=slot)
    order = np.random.default_rng(0).permutation(len(counts)).tolist()
    steps = [(counts[i], i + 1, i + 1 if (i + 1) % 3 else DUMMY) for i in order]
    rows = sum(counts)
    x, gates = model.inputs(rows + 3, seed=99)
    x[rows:], gates[rows:] = NAN, NAN
    before = States(*(each.cpu() for each in (model.states.inputs, model.states.matrices)))
    got = model.run(x, gates, steps)
    cpu, layer = TorchRecurrent(torch.device("cpu")), on_cpu(model.layer)
    plan, parts = cpu.plan(sequences(steps)), (x.cpu().float(), gates.cpu().float())
    if isinstance(layer, DeltaRule):
        want = cpu.delta_rule(*parts, layer, before, plan)
    else:
        want = cpu.scan(*parts, layer, before, plan)
    assert (got[rows:] == 0).all()
    ends = np.cumsum([count for count, _, _ in steps])
    for (count, slot, _), end in zip(steps, ends, strict=True):
        own = slice(int(end) - count, int(end))
        near(got[own].cpu(), want[own].double())
        assert torch.equal(model.states.inputs[slot].cpu(), before.inputs[slot])
        near(model.states.matrices[slot].cpu(), before.matrices[slot].double())
    untouched(model, [0, 15])


def on_cpu(layer: DeltaRule | Scan) -> DeltaRule | Scan:
    bias = layer.convolution.bias
    weight = layer.convolution.weight.cpu().float()
    convolution = Convolution(weight, None if bias is None else bias.cpu().float())
    decay = Decay(layer.decay.a_log.cpu(), layer.decay.dt_bias.cpu())
    if isinstance(layer, DeltaRule):
        return replace(layer, convolution=convolution, decay=decay)
    return replace(layer, convolution=convolution, decay=decay, skip=layer.skip.cpu())


@pytest.mark.parametrize("rows", [64, 65, 128, 200])
def test_a_snapshot_is_the_state_at_a_chunk_and_is_read_without_a_copy(
    rows: int, model: Model
) -> None:
    x, gates = model.inputs(rows)
    more = model.inputs(100, seed=5)
    both = torch.cat((more[0], x)), torch.cat((more[1], gates))
    kept = [(1, at, 5 + at // CHUNK) for at in range(CHUNK, rows + 1, CHUNK)]
    kept.append((0, CHUNK, 9))
    whole = model.run(*both, [(100, 1, DUMMY), (rows, 2, DUMMY)], kept)[100:]
    same(model, 2, model.want(rows), whole)
    for at in range(CHUNK, rows + 1, CHUNK):
        slot = 5 + at // CHUNK
        _, inputs, matrices = model.want(at)
        assert torch.equal(model.states.inputs[slot].double(), inputs)
        near(model.states.matrices[slot], matrices)
        left = rows - at
        if left:
            twice = torch.cat((x[at:], x[at:])), torch.cat((gates[at:], gates[at:]))
            resumed = model.run(*twice, [(left, 3, slot), (left, 4, slot)])
            near(resumed[:left], whole[at:].double(), 2 * OFF)
            assert torch.equal(resumed[:left], resumed[left:])
            assert torch.equal(model.states.matrices[3], model.states.matrices[4])
    near(model.states.matrices[9], model.want(CHUNK, seed=5)[2])
    untouched(model, [0, 10, 11])


class Captured(NamedTuple):
    slots: torch.Tensor
    sources: torch.Tensor
    x: torch.Tensor
    gates: torch.Tensor
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


def captured(model: Model, rows: int) -> Captured:
    """A step of decodes, and what its replays read and write."""
    slots, sources = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    plan = model.kernels.plan_in_place(slots, sources)
    x, gates = (each.clone() for each in model.inputs(rows))
    model.planned(x, gates, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.planned(x, gates, plan)
    return Captured(slots, sources, x, gates, graph, out)


def test_a_captured_step_follows_its_slots_and_ignores_padding(model: Model) -> None:
    rows = 12
    slots, sources, x, gates, graph, out = captured(model, rows)
    for step in range(4):
        count = rows - 2 * step
        more = [model.inputs(4, seed=slot) for slot in range(1, count + 1)]
        x.fill_(NAN)
        for row, (own, own_gates) in enumerate(more):
            x[row], gates[row] = own[step], own_gates[step]
        slots.zero_()
        slots[:count] = torch.arange(1, count + 1)
        sources.copy_(slots if step else torch.zeros_like(slots))
        graph.replay()
        assert (out[count:] == 0).all()
        for row in range(count):
            want = model.want(4, seed=row + 1)[0][step]
            near(out[row], want)
    untouched(model, [0, 13, 14, 15])


def test_keys_that_repeat_lose_no_digits(model: Model) -> None:
    """A prompt of one token, with shares near to 1 and decays near to 1: sums of powers of the
    system would have terms of 1e17."""
    x, gates = model.inputs(130)
    x[:] = x[0].clone()
    if isinstance(model.layer, DeltaRule):
        gates[:, :6], gates[:, 6:] = 8.0, -12.0
    want = expected(model.layer, x.double(), gates.double())
    near(model.run(x, gates, [(130, 1, DUMMY)]), want[0], 2e-2)
    near(model.states.matrices[1], want[2], 2e-2)


def test_results_are_where_they_are_asked_for(model: Model) -> None:
    x, gates = model.inputs(70)
    want = model.run(x, gates, [(70, 1, DUMMY)])
    wide = torch.full((70, want.shape[1] + 64), NAN, dtype=torch.bfloat16, device="cuda")
    plan = model.kernels.plan(sequences([(70, 2, DUMMY)]))
    for into in (wide[:, 32:-32], wide[:, 3:-61]):  # whose rows are aligned, and are not
        into.fill_(NAN)
        run = model.kernels.delta_rule if isinstance(model.layer, DeltaRule) else model.kernels.scan
        got = run(x, gates, model.layer, model.states, plan, into)  # type: ignore[arg-type]
        assert got is into and torch.equal(got, want)


def test_gated_norms_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    kernels, cpu = CudaRecurrent(torch.device("cuda")), TorchRecurrent(torch.device("cpu"))
    for rows, heads in ((1, 1), (5, 6), (300, 32)):
        x, both = bf16(rows, heads * 128), bf16(rows, heads * 128 + 64)
        gate, weight = both[:, 32:-32], torch.randn(128, device="cuda")
        for norm in (Norm(weight, 1e-6), Norm(weight.to(torch.bfloat16), 1e-6)):
            for name in ("silu", "sigmoid"):
                got = kernels.norm_then_gate(x, gate, norm, name)
                there = Norm(norm.weight.cpu(), norm.eps)
                want = cpu.norm_then_gate(x.cpu().float(), gate.cpu().float(), there, name)
                near(got.cpu(), want.double(), 3e-3)
        whole = torch.randn(heads * 128, device="cuda")
        for groups in (1, heads):
            got = kernels.gate_then_norm(x, gate, Norm(whole, 1e-5), groups)
            there = Norm(whole.cpu(), 1e-5)
            want = cpu.gate_then_norm(x.cpu().float(), gate.cpu().float(), there, groups)
            near(got.cpu(), want.double(), 3e-3)


@pytest.mark.parametrize("rows", LENGTHS)
def test_a_state_in_bfloat16_is_that_of_float32_rounded(rows: int) -> None:
    """Of a prompt, and of rows that go on from such a state, in every form of the kernels."""
    wide, small = fresh(delta_rule), fresh(delta_rule, torch.bfloat16)
    for at, count in enumerate((rows, 1, rows)):
        x, gates = wide.inputs(count, seed=at)
        steps = [(count, 1, 1 if at else DUMMY)]
        want, got = (each.run(x, gates, steps) for each in (wide, small))
        near(got, want.double(), 1e-3)
        rounded = wide.states.matrices[1].bfloat16()
        near(small.states.matrices[1], rounded.double(), 5e-4)
        assert torch.equal(small.states.inputs[1], wide.states.inputs[1])
        small.states.matrices[1] = rounded  # the next ones start from the same
        wide.states.matrices[1] = rounded.float()
    untouched(small, [slot for slot in range(SLOTS) if slot != 1])


@pytest.mark.parametrize("rows", [64, 65, 200])
def test_snapshots_in_bfloat16_are_states_at_a_chunk(rows: int) -> None:
    """Within a step the state stays in float32, so only where it was stored it is rounded."""
    model = fresh(delta_rule, torch.bfloat16)
    x, gates = model.inputs(rows)
    kept = [(0, at, 5 + at // CHUNK) for at in range(CHUNK, rows + 1, CHUNK)]
    whole = model.run(x, gates, [(rows, 2, DUMMY)], kept)
    near(whole, model.want(rows)[0])
    for at in range(CHUNK, rows + 1, CHUNK):
        near(model.states.matrices[5 + at // CHUNK], model.want(at)[2])
        if left := rows - at:
            resumed = model.run(x[at:], gates[at:], [(left, 3, 5 + at // CHUNK)])
            near(resumed, whole[at:].double(), 2 * OFF)
    untouched(model, [0, 1, 10, 11])


def test_a_captured_step_reads_and_writes_states_in_bfloat16() -> None:
    """Slots by decodes beside padding, for 64 rows of each: near what float32 has."""
    model, rows, decodes = fresh(delta_rule, torch.bfloat16), 4, 64
    slots, sources, x, gates, graph, out = captured(model, rows)
    own = [model.inputs(decodes, seed=slot) for slot in (1, 2, 3)]
    made = []
    x.fill_(NAN)
    slots[:3] = torch.arange(1, 4)
    for step in range(decodes):
        for row, (each, own_gates) in enumerate(own):
            x[row], gates[row] = each[step], own_gates[step]
        sources.copy_(slots if step else torch.zeros_like(slots))
        graph.replay()
        made.append(out.clone())
    got = torch.stack(made)
    assert (got[:, 3] == 0).all()
    for row in range(3):
        want = model.want(decodes, seed=row + 1)
        near(got[:, row], want[0], 3e-2)
        near(model.states.matrices[row + 1], want[2], 3e-2)
    untouched(model, [0, 4, 5])


@torch.inference_mode()
def test_the_drift_of_a_state_levels_off(capsys: pytest.CaptureFixture[str]) -> None:
    """8,192 decodes against float64: in float32 it stays at rounding, in bfloat16 below a part in a
    hundred of decays up to .99, and in neither does it grow."""
    rows, parts = 8192, 8
    drifts: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = fresh(delta_rule, dtype)
        x, gates = model.inputs(rows)
        if not drifts:
            want = expected(model.layer, x.double(), gates.double())[0]
        slots = torch.ones(1, dtype=torch.int64, device="cuda")
        model.run(x[:1], gates[:1], [(1, 1, DUMMY)])
        plan, made = model.kernels.plan_in_place(slots, slots), []
        states = []
        for row in range(1, rows):
            made.append(model.planned(x[row : row + 1], gates[row : row + 1], plan))
            if (row + 1) % (rows // parts) == 0:
                states.append(model.states.matrices[1].double())
        got = torch.cat(made)
        near(got[-1024:], want[1 - rows :][-1024:], 5e-3 if dtype == torch.float32 else 3e-2)
        ends = [(at + 1) * (rows // parts) for at in range(parts)]
        drifts[dtype] = [
            off(state, expected(model.layer, x[:end].double(), gates[:end].double())[2])
            for end, state in list(zip(ends, states, strict=True))[:: parts - 1]
        ]
    with capsys.disabled():
        for dtype, found in drifts.items():
            shown = ", ".join(f"{one:.2e}" for one in found)
            print(f"\nstate in {dtype}: off float64 by {shown} after 1,024 and 8,192 decodes")
    assert max(drifts[torch.float32]) < 1e-5
    assert max(drifts[torch.bfloat16]) < 3e-2
