"""Recurrent layers in plain torch: those of the CPU, and the reference for the tests.

Every sequence is cut in chunks of CHUNK rows; the chunks are batched over sequences, the first of
each, then the second. A chunk of up to SHORT rows is computed row by row, a longer one at once and
padded to CHUNK rows. Which of both depends on the chunk alone, so a sequence has the same bits
alone and among others, whole and resumed at a multiple of CHUNK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.kernels.projection import Norm
from kvline_server.kernels.recurrent import (
    CHUNK,
    DUMMY,
    Convolution,
    Decay,
    DeltaRule,
    Recurrent,
    Scan,
    Sequences,
    Snapshots,
    States,
)
from kvline_server.kernels.torch_chunks import (
    delta_chunk,
    delta_rows,
    scan_chunk,
    scan_rows,
    sigmoid,
    silu,
    softplus,
)

# Rows that are computed one by one: decodes with their draft tokens, ends of prompts. A row takes a
# thirtieth of the time of CHUNK rows at once (Qwen3.5-0.8B's layer, one thread).
SHORT = 16
# Elements of the states that are computed at a time: what a step takes is bounded.
AT_ONCE = 1 << 18
FILTERED = 1 << 20  # and of the convolution's rows
EPSILON = 1e-6  # of the length of queries and keys

# Of a batch, from its states, which it updates in place, to outputs [sequences, rows, ...].
Step = Callable[["Batch", torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A chunk of each of some sequences, computed together."""

    rows: torch.Tensor  # int64 [sequences, rows]; behind a chunk's end its last row again
    real: torch.Tensor | None  # bool [sequences, rows]; None: all are
    slots: torch.Tensor  # int64 [sequences], written
    sources: torch.Tensor  # int64 [sequences], read; DUMMY: none, it starts from zero
    host: NDArray[np.int64]  # [sequences, 2], both
    # int64 [snapshots], twice: slots that are copied once the batch is done, and to which.
    copies: tuple[torch.Tensor, torch.Tensor]

    @property
    def short(self) -> bool:
        return self.rows.shape[1] <= SHORT

    def split(self, most: int) -> Iterator[Batch]:
        """In batches of up to so many sequences, or of one where matrices are multiplied."""
        count = most if self.short else 1
        for at in range(0, len(self.rows), count):
            some = slice(at, at + count)
            real = None if self.real is None else self.real[some]
            yield replace(
                self,
                rows=self.rows[some],
                real=real,
                slots=self.slots[some],
                sources=self.sources[some],
                host=self.host[some],
            )

    def advance(self, pool: torch.Tensor, step: Step) -> torch.Tensor:
        """The states by the batch's rows. -> outputs [sequences, rows, ...]"""
        if len(self.rows) > 1:
            state = pool[self.sources].float()
            if (self.host[:, 1] == DUMMY).any():
                state.masked_fill_((self.sources == DUMMY).view(-1, 1, 1, 1), 0)
            made = step(self, state)
            pool[self.slots] = state.to(pool.dtype)
            return made
        # In place: to gather and scatter a large state takes longer than a row of it.
        slot, source = self.host[0].tolist()
        own = pool[slot : slot + 1]
        if source == DUMMY:
            own.zero_()
        elif source != slot:
            own.copy_(pool[source : source + 1])
        state = own.float()
        made = step(self, state)
        if state.dtype != own.dtype:
            own.copy_(state)
        return made

    def store(self, made: torch.Tensor, into: torch.Tensor) -> None:
        """The real rows' outputs."""
        if self.real is None:
            into[self.rows] = made.to(into.dtype)
        else:
            into[self.rows[self.real]] = made[self.real].to(into.dtype)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int  # that are no padding
    sequences: torch.Tensor  # int64 [rows], whose each is
    within: torch.Tensor  # int64 [rows], rows of its sequence before each
    ends: torch.Tensor  # int64 [sequences], of their rows
    counts: torch.Tensor  # int64 [sequences], of their rows
    slots: torch.Tensor  # int64 [sequences], written
    sources: torch.Tensor  # int64 [sequences], read; DUMMY: none
    kept: torch.Tensor  # int64 [snapshots], the row behind which each is
    kept_slots: torch.Tensor  # int64 [snapshots]
    batches: tuple[Batch, ...]


# Of a step that writes a state behind each row: rows with a plan of their own, int64 [own rows],
# one part after the other.
Parts = tuple[tuple[torch.Tensor, Plan], ...]


class TorchRecurrent(Recurrent):
    plan_in_place = None  # nothing is captured

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plan(self, sequences: Sequences) -> Plan | Parts:
        if sequences.each is None:
            return self._plan(sequences)
        return tuple(self._parts(sequences, sequences.each))

    def _parts(
        self, sequences: Sequences, each: NDArray[np.int64]
    ) -> Iterator[tuple[torch.Tensor, Plan]]:
        """The first row of each decode, with all of the prompts; then all second rows, and so on: a
        state is written behind each."""
        starts, rows = sequences.starts.astype(np.int64), len(each)
        decodes = int(np.searchsorted(starts, rows))
        counts, first = np.diff(starts[: decodes + 1]), starts[:decodes]
        for at in range(int(counts.max(initial=1))):
            own = first[counts > at] + at
            sources = sequences.sources[:decodes][counts > at] if not at else each[own - 1]
            ends, slots = np.arange(len(own) + 1), each[own]
            if at:
                plan = Sequences(ends.astype(np.int32), slots, sources)
                yield self._there(own), self._plan(plan)
                continue
            plan = Sequences(
                np.concatenate((ends, starts[decodes + 1 :] - rows + decodes)).astype(np.int32),
                np.concatenate((slots, sequences.slots[decodes:])),
                sequences.sources,
                sequences.snapshots,
            )
            prompts = np.arange(rows, starts[-1])
            yield self._there(np.concatenate((own, prompts))), self._plan(plan)

    def _plan(self, sequences: Sequences) -> Plan:
        starts = sequences.starts.astype(np.int64)
        counts = np.diff(starts)
        none = np.zeros(0, np.int64)
        kept = sequences.snapshots or Snapshots(none, none, none)
        assert not (kept.rows % CHUNK).any() and (kept.rows > 0).all()
        assert (kept.rows <= counts[kept.sequences]).all()
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return Plan(
            rows=int(starts[-1]),
            sequences=self._there(np.repeat(np.arange(len(counts)), counts)),
            within=self._there(within),
            ends=self._there(starts[1:]),
            counts=self._there(counts),
            slots=self._there(sequences.slots),
            sources=self._there(sequences.sources),
            kept=self._there(starts[kept.sequences] + kept.rows),
            kept_slots=self._there(kept.slots),
            batches=tuple(self._batches(sequences, starts[:-1], counts, kept)),
        )

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _batches(
        self, sequences: Sequences, starts: np.ndarray, counts: np.ndarray, kept: Snapshots
    ) -> Iterator[Batch]:
        """In the order of each sequence's chunks."""
        for first in range(0, int(counts.max(initial=0)), CHUNK):
            sizes = (counts - first).clip(0, CHUNK)
            padded = np.where(sizes > SHORT, CHUNK, sizes)
            for size in np.unique(padded[padded > 0]):
                (own,) = np.nonzero(padded == size)
                at, sized = np.arange(size), sizes[own, None]
                real, slots = at < sized, sequences.slots
                sources = slots if first else sequences.sources
                now = (kept.rows == first + CHUNK) & (size == CHUNK)
                yield Batch(
                    rows=self._there(starts[own, None] + first + np.minimum(at, sized - 1)),
                    real=None if real.all() else self._there(real),
                    slots=self._there(slots[own]),
                    sources=self._there(sources[own]),
                    host=np.stack((slots[own], sources[own]), axis=1),
                    copies=(
                        self._there(slots[kept.sequences[now]]),
                        self._there(kept.slots[now]),
                    ),
                )

    def delta_rule(
        self,
        qkv: torch.Tensor,
        ba: torch.Tensor,
        layer: DeltaRule,
        states: States,
        plan: Plan | Parts,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
        if isinstance(plan, tuple):
            made = _out(qkv, values, out)
            for rows, part in plan:
                made[rows] = self.delta_rule(qkv[rows], ba[rows], layer, states, part)
            return made
        mixed = convolve(qkv, layer.convolution, states.inputs, plan)
        q, k, v = torch.split(mixed, [keys, keys, values], dim=1)
        q, k = (_unit(x.view(plan.rows, layer.key_heads, layer.key_dim)) for x in (q, k))
        q *= layer.key_dim**-0.5
        v = v.view(plan.rows, layer.key_heads, -1, layer.value_dim)
        b, a = ba[: plan.rows].float().view(plan.rows, 2, layer.key_heads, -1).unbind(1)
        beta, decay = sigmoid(b), _log_decay(a, layer.decay)[1]

        def step(batch: Batch, state: torch.Tensor) -> torch.Tensor:
            run = delta_rows if batch.short else delta_chunk
            at = batch.rows
            shares, decays = (_masked(x[at], batch.real) for x in (beta, decay))
            grouped = _grouped(state, layer.key_heads)
            return run(q[at], k[at], v[at], shares, decays, grouped)

        made = _out(qkv, values, out)
        _advance(plan, states.matrices, step, made)
        return made

    def scan(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        layer: Scan,
        states: States,
        plan: Plan | Parts,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups, width = layer.groups, layer.heads * layer.head_dim
        if isinstance(plan, tuple):
            made = _out(xbc, width, out)
            for rows, part in plan:
                made[rows] = self.scan(xbc[rows], dt[rows], layer, states, part)
            return made
        mixed = convolve(xbc, layer.convolution, states.inputs, plan)
        shared = groups * layer.state_dim
        x, b, c = torch.split(mixed, [width, shared, shared], dim=1)
        x = x.view(plan.rows, groups, -1, layer.head_dim)
        b, c = (each.view(plan.rows, groups, layer.state_dim) for each in (b, c))
        delta, decay = _log_decay(dt[: plan.rows].float().view(plan.rows, groups, -1), layer.decay)

        def step(batch: Batch, state: torch.Tensor) -> torch.Tensor:
            run = scan_rows if batch.short else scan_chunk
            at = batch.rows
            steps, decays = (_masked(each[at], batch.real) for each in (delta, decay))
            made = run(x[at], b[at], c[at], steps, decays, _grouped(state, groups))
            return made + x[at] * layer.skip.view(groups, -1, 1)

        made = _out(xbc, width, out)
        _advance(plan, states.matrices, step, made)
        return made

    def norm_then_gate(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, activation: str
    ) -> torch.Tensor:
        dim = len(norm.weight)
        heads, gates = (
            each.float().reshape(len(x), each.shape[1] // dim, dim) for each in (x, gate)
        )
        made = _rms(heads, norm.eps) * norm.weight.float()
        made *= silu(gates) if activation == "silu" else sigmoid(gates)
        return made.flatten(1).to(x.dtype)

    def gate_then_norm(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, groups: int
    ) -> torch.Tensor:
        gated = x.float() * silu(gate.float())
        made = _rms(gated.view(len(x), groups, x.shape[1] // groups), norm.eps).flatten(1)
        return made.mul_(norm.weight.float()).to(x.dtype)


def convolve(
    x: torch.Tensor, convolution: Convolution, inputs: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """silu of the convolution of the rows that are no padding; `inputs` are those of States.
    [rows, channels] -> float32 [plan.rows, channels]"""
    x = x[: plan.rows]
    made = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    before = inputs[plan.sources].masked_fill_((plan.sources == DUMMY).view(-1, 1, 1), 0)
    after = torch.empty_like(before)
    step = max(1, FILTERED // max(1, plan.rows))
    for at in range(0, x.shape[1], step):
        some = slice(at, at + step)
        weight, bias = convolution.weight[some].float(), convolution.bias
        own = x[:, some].float() * weight[:, -1]
        if bias is not None:
            own += bias[some].float()
        for lag in range(1, inputs.shape[1] + 1):
            earlier = _earlier(x[:, some], before[..., some], after[..., some], lag, plan)
            own += earlier.float() * weight[:, -1 - lag]
        made[:, some] = silu(own)
    inputs[plan.slots] = after
    behind = torch.arange(-inputs.shape[1], 0, device=x.device)
    inputs[plan.kept_slots] = x[plan.kept.unsqueeze(1) + behind].to(inputs.dtype)
    return made


def _earlier(
    x: torch.Tensor, before: torch.Tensor, after: torch.Tensor, lag: int, plan: Plan
) -> torch.Tensor:
    """What each row's sequence had `lag` rows before it, and into `after` what it has so many rows
    before its end. x [rows, channels], before, after [sequences, kept, channels] -> as x"""
    kept = before.shape[1]
    made = x.roll(lag, 0)
    (early,) = torch.nonzero(plan.within < lag, as_tuple=True)
    # Rows before a sequence's first one are in its slot, the newest last.
    made[early] = before[plan.sequences[early], kept - lag + plan.within[early]].to(x.dtype)
    old = (kept - lag + plan.counts).clamp(max=kept - 1)
    stays = before[torch.arange(len(old), device=x.device), old]
    new = x[(plan.ends - lag).clamp(min=0)].to(after.dtype)
    after[:, kept - lag] = torch.where((plan.counts < lag).unsqueeze(1), stays, new)
    return made


def _advance(plan: Plan, pool: torch.Tensor, step: Step, out: torch.Tensor) -> None:
    """Every sequence's state by its rows, whose outputs are written to `out` [rows, width]."""
    together = max(1, AT_ONCE // pool[0].numel())
    for batch in plan.batches:
        for some in batch.split(together):
            some.store(some.advance(pool, step).flatten(2), out)
        copied, into = batch.copies
        pool[into] = pool[copied]


def _out(x: torch.Tensor, width: int, out: torch.Tensor | None) -> torch.Tensor:
    """Zeros: what padding rows have."""
    return x.new_zeros((len(x), width)) if out is None else out.zero_()


def _log_decay(x: torch.Tensor, decay: Decay) -> tuple[torch.Tensor, torch.Tensor]:
    """The softplus, and the decay's logarithm. float32 [rows, groups, heads of each], twice"""
    a_log, dt_bias = (each.view(x.shape[1:]) for each in (decay.a_log, decay.dt_bias))
    delta = softplus(x + dt_bias)
    return delta, -a_log.exp() * delta


def _grouped(state: torch.Tensor, groups: int) -> torch.Tensor:
    """[sequences, heads, ...] -> [sequences, groups, heads of each, ...]"""
    return state.view(len(state), groups, -1, *state.shape[2:])


def _masked(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """0 behind a chunk's end, where nothing is added to a state and nothing decays."""
    return x if real is None else x.masked_fill(~real.view(*real.shape, 1, 1), 0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Of length 1. A new tensor."""
    return x * (x.square().sum(dim=-1, keepdim=True) + EPSILON).rsqrt()


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
