"""The interface of a kernel backend. One object per engine; it knows the device and the dtype.

The decoder uses nothing else. Tensors are on the backend's device; the layout is in host memory,
planned once per step and used by every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from kvline_server.kernels import torch_experts
from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.group import Group
from kvline_server.kernels.layout import Draws, Layout
from kvline_server.kernels.projection import (
    STORE,
    Epilogue,
    Gate,
    Join,
    Norm,
    Operand,
    Projection,
    Store,
)
from kvline_server.kernels.routing import Played
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import KVLayer

NO_TOKEN = -1  # the result for a row whose logits are not finite
LOGIT_BLOCK = 16  # rows of one LM-head GEMM on the CPU, fixed because results depend on it


@dataclass(frozen=True, slots=True)
class RowScores:
    """Logprobs of some rows, on the device."""

    values: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int32 [rows], 1 = most likely
    top_ids: torch.Tensor  # int32 [rows, top]
    top_values: torch.Tensor  # float32 [rows, top]

    def tensors(self) -> list[torch.Tensor]:
        return [self.values, self.ranks, self.top_ids, self.top_values]

    @classmethod
    def stack(cls, parts: list[RowScores]) -> RowScores:
        """Concatenates tables of equal `top`."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.tensors() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


@dataclass(frozen=True, slots=True)
class PartScores:
    """Of some rows, what a rank knows from its own tokens."""

    normalisers: torch.Tensor  # float32 [rows], log of the sum of exponentials
    above: torch.Tensor  # int32 [rows], tokens more likely than the target
    top_ids: torch.Tensor  # int32 [rows, top], counted from the rank's first
    top_logits: torch.Tensor  # float32 [rows, top]


# Rows that are no padding; in captured graphs int32 [2] on the device: those and a Played.
Given = int | torch.Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts."""

    chosen: int  # of a row
    renormalise: bool  # the weights of the chosen ones add up to 1
    activation: str


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Each row's position in its sequence, and the KV-cache slot of its key and value."""

    positions: torch.Tensor  # int32 or int64 [rows]
    slots: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True)
class PageTables:
    """Rows and pages of the sequences of one attention call, on host and device."""

    row_starts: np.ndarray  # int32 [sequences + 1], from 0
    page_starts: np.ndarray  # int32 [sequences + 1], from 0
    lengths: np.ndarray  # int32 [sequences]
    device_row_starts: torch.Tensor
    device_page_starts: torch.Tensor
    pages: torch.Tensor  # int32
    last_page: torch.Tensor  # int32 [sequences], tokens in each one's last page


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's queries, keys and values: the output of the QKV GEMM."""

    fused: torch.Tensor  # [rows, heads + 2 * kv_heads, dim]
    queries: int  # heads
    keys: int  # key heads, and as many value heads
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    eps: float

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(self.fused, [self.queries, self.keys, self.keys], dim=1)
        return q, k, v


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention call may differ in from that of others."""

    window: int = 0  # tokens that a query sees, itself included; 0: all before it
    scale: float | None = None  # of query times key; None: 1 / sqrt(dim)


PLAIN = AttentionOptions()


class Fetch(Protocol):
    """Copies to the host under way."""

    def wait(self) -> list[np.ndarray]: ...


class Kernels(Protocol):
    device: torch.device
    dtype: torch.dtype  # of weights and hidden states
    depth: int  # steps in flight while the host prepares the next one: 1 on a GPU, 0 on the CPU
    group: Group  # the ranks that have the other parts of the model
    tunes: bool = False  # has kernels to choose among by trial
    build: str = ""  # that the numbers of tuning.Choices are of; empty where nothing is chosen
    keeps_fp8: bool = False  # takes an Fp8Weight, of a shape that fp8.fits lets pass
    tiles_context: bool = False  # attention holds nothing for each row and token of its context
    routing: Played = Played.NOTHING  # of the step that runs

    @property
    def plan_in_place(self) -> Callable[[PageTables], Any] | None:
        """A plan of decodes for a captured graph: planned again with the same addresses and number
        of sequences, it changes what the graph attends to. None where nothing can be captured."""

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copies the arrays to the device, as one transfer on a GPU."""

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        """Starts copies to the host, behind all work enqueued before."""

    def pack(self, weight: Weight) -> Weight:
        """A weight in the layout that is fastest for `project`."""

    def padded(self, rows: int) -> int:
        """The row count that a step of `rows` rows is padded to, where no graph is captured."""
        return rows

    def row_counts(self, largest: int) -> list[int]:
        """All results of `padded` for up to `largest` rows, to run once before memory is measured;
        empty where a new row count allocates nothing."""
        return []

    def plan(self, layout: Layout) -> Any:
        """Prepares attention for a step; the result is used by every layer."""

    def project(self, x: Operand, projection: Projection, then: Epilogue = STORE) -> Operand:
        """x W^T + b, and what follows it. x [rows, in] -> as the epilogue says; what Join gives is
        valid until the group's next sum"""
        if isinstance(then, Gate):
            return Operand(self.activate_and_mul(self.linear(x, projection), then.activation))
        if isinstance(then, Store):
            return Operand(self.linear(x, projection, then.out))
        out = self.group.buffer(len(x), len(projection))
        return self.join(self.linear(x, projection, out), then)

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`project` with nothing that follows. -> [rows, out], in `out` if given"""

    def join(self, made: torch.Tensor, then: Join) -> Operand:
        """What follows a rank's term of a sum. Overwrites both. [rows, hidden]"""
        made, residual = self.group.all_reduce(made), then.residual
        if then.after is None and then.before is not None:
            return Operand(self.add_norm(made, residual, then.before))
        residual.add_(made if then.after is None else self.rms_norm(made, then.after))
        return Operand(residual if then.before is None else self.rms_norm(residual, then.before))

    def settle(self, x: Operand) -> torch.Tensor:
        """Its rows, with what was left to do. [rows, in]"""
        if x.norm is not None:
            return self.rms_norm(x.rows, x.norm)
        return self.activate_and_mul(x.rows, "silu") if x.gated else x.rows

    def experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        routing: Routing,
        rows: Given,
    ) -> torch.Tensor:
        """The sum of each row's experts, an MLP each, by the weights that the router's logits give
        them; of a rank's columns, for Group.all_reduce. Rows after the first `rows` are padding,
        and have no expert.
        x [rows, hidden], logits [rows, experts], gate_up [experts * 2 * width, hidden], down
        [experts * hidden, width] -> [rows, hidden]"""
        assert isinstance(rows, int)  # nothing of it can be captured
        logits = torch_experts.played(logits[:rows], routing.chosen, self.routing)
        given = torch_experts.run(
            x[:rows],
            torch_experts.route(logits, routing.chosen, routing.renormalise),
            gate_up,
            down,
            lambda made: self.activate_and_mul(made, routing.activation),
        )
        return given if rows == len(x) else pad(given, (0, 0, 0, len(x) - rows))

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Over the last dimension."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """RMS norm of x + residual, which becomes that sum. May overwrite x too."""

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """silu or gelu_tanh of the first half times the second. [rows, 2 * d] -> [rows, d]"""

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """float32 [positions, dim / 2], twice -> both in the layout that `write` reads."""

    def write(self, heads: Heads, rope: torch.Tensor, mapping: SlotMapping, cache: KVLayer) -> None:
        """Applies QK norm (if the model has it) and rotary embedding, writes keys and values to the
        cache. Changes queries in place, and possibly keys."""

    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: Any,
        out: torch.Tensor | None = None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Causal attention of q [rows, heads, dim] over the cache. -> [rows, heads * dim]"""

    def tune(
        self, weights: list[list[Weight]], rows: list[int], known: Choices | None
    ) -> Choices | None:
        """Autotunes GEMMs at these row counts. `weights` has a list per GEMM of a layer: its weight
        of each layer; `known` are the choices of an earlier start, which are taken over. -> the
        choices, None where there is nothing to tune"""

    def tune_experts(
        self,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        routing: Routing,
        rows: list[int],
        known: Choices | None,
    ) -> None:
        """As `tune`, of a mixture of experts, whose choices are among those that `tune` gives then.
        `layers` has gate_up and down of each. Does nothing where there is nothing to choose."""
        return

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The LM head's GEMM. [rows, hidden] -> [rows, tokens of the head]"""

    def part_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> PartScores:
        """What a rank knows of some rows' scores, from raw logits of its own tokens and `chosen`,
        each row's logit of its target, float32 [rows]. [rows, tokens]"""

    def best(self, logits: torch.Tensor, draws: Draws, first: int) -> torch.Tensor:
        """`choose` without filters among a rank's own tokens, the first of which is `first`. Ranks
        compare the results (kernels/best.py). Leaves `logits` as they are. -> int64 [rows]"""

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        """Each row's logprob of its target, the target's rank, and the `top` best tokens, from raw
        logits of the whole vocabulary: before temperature, penalties and filters. targets int64
        [rows]"""

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Samples a token per row: temperature, top-k, top-p, min-p, then Gumbel-max
        (kernels/noise.py). May change `logits`. -> int64 [rows] on the device; NO_TOKEN for a row
        with a NaN or an infinite maximum, otherwise always below the vocabulary's size"""
