"""What a backend of kernels must do. One object an engine; it knows device and number format.

The decoder is written against this alone. Tensors are the backend's own; the layout is host
numbers, planned once a step and then used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvline_server.kernels.layout import Layout
from kvline_server.kernels.tuning import Choices

GREEDY = 1e-5  # temperatures below mean argmax: dividing by them would overflow
NO_TOKEN = -1  # chosen where a row's logits are not finite
LOGIT_BLOCK = 16  # rows of one LM-head GEMM on the CPU; its bits depend on the row count


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's slice of the arena."""

    keys: torch.Tensor  # [pages, page, kv_heads, dim]
    values: torch.Tensor  # [pages, page, kv_heads, dim]


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row's next token is chosen; neutral values mean «off»."""

    temperatures: np.ndarray  # float32 [rows]; below GREEDY the best token is taken
    top_k: np.ndarray  # int32 [rows], 0: all
    top_p: np.ndarray  # float32 [rows]
    min_p: np.ndarray  # float32 [rows]
    keys: np.ndarray  # uint64 [rows]: what the noise of each row's draw is made from


@dataclass(frozen=True, slots=True)
class RowScores:
    """Log-probabilities of some rows, on the device."""

    values: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int32 [rows], 1 = most likely
    top_ids: torch.Tensor  # int32 [rows, top]
    top_values: torch.Tensor  # float32 [rows, top]

    def tensors(self) -> list[torch.Tensor]:
        return [self.values, self.ranks, self.top_ids, self.top_values]

    @classmethod
    def stack(cls, parts: list[RowScores]) -> RowScores:
        """Consecutive rows of equal `top` as one."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.tensors() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Where:
    """Each row's position in its sequence, and the slot its key and value go to."""

    positions: torch.Tensor  # int32 or int64 [rows]
    slots: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's queries, keys and values as they leave their GEMM."""

    fused: torch.Tensor  # [rows, heads + 2 * kv_heads, dim]
    queries: int
    keys: int  # and as many values
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    eps: float

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(self.fused, [self.queries, self.keys, self.keys], dim=1)
        return q, k, v


class Fetch(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[np.ndarray]: ...


class Forward(Protocol):
    """A step through the decoder: plans it, then runs it. wanted int64 [n] -> [n, hidden]"""

    def __call__(
        self,
        token_ids: torch.Tensor,
        where: Where,
        cache: list[KVLayer],
        layout: Layout,
        wanted: torch.Tensor,
    ) -> torch.Tensor: ...


class Graphs(Protocol):
    """A decoder's forward as captured graphs."""

    eager: int  # steps that no graph fits

    @property
    def step(self) -> Forward: ...


class Kernels(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and KV cache."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight while the host prepares the next: 1 where the device
        works beside the host, 0 where it is the host."""

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays on the device, in one copy where that pays."""

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        """Starts copies to the host, after all work that was asked for before."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A GEMM's weight in the layout that `linear` likes best."""

    def padded(self, rows: int) -> int:
        """The row count that a step of so many rows runs at, where each count has its price."""

    def row_counts(self, largest: int) -> list[int]:
        """All that `padded` gives for up to `largest` rows, to be met before memory is measured;
        empty where a row count costs nothing."""

    def plan(self, layout: Layout) -> Any:
        """What `attend` needs for a step, the same for every layer."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [rows, in] times weight [out, in]. -> [rows, out], in `out` where it is given"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, normed, and the sum itself. Both inputs are used up."""

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second. [rows, 2 * d] -> [rows, d]"""

    def rope_table(self, inverse_frequencies: torch.Tensor, positions: int) -> torch.Tensor:
        """cos and sin of every position, in the form that `write` wants."""

    def write(self, heads: Heads, rope: torch.Tensor, where: Where, cache: KVLayer) -> None:
        """Norms queries and keys if the model does, turns them by their positions, puts keys and
        values into the cache. Queries change in place, keys may."""

    def attend(
        self, q: torch.Tensor, cache: KVLayer, plan: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention of q [rows, heads, dim] over the cache. -> [rows, heads * dim]"""

    def tune(
        self, weights: list[list[torch.Tensor]], rows: list[int], known: Choices | None
    ) -> Choices | None:
        """Picks by trial what multiplies so many rows by weights of each shape, given as one list
        of layers a GEMM; `known` are the picks of an earlier start. -> the picks, None where
        there is nothing to pick from"""

    def graphs(self, decoder: Any, cache: list[KVLayer], max_rows: int) -> Graphs | None:
        """The decoder's forward as captured graphs, where the device has such a thing."""

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The LM head's GEMM. [rows, hidden] -> [rows, vocabulary]"""

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        """Each row's log-probability of its target, the target's rank, and its `top` best tokens;
        raw, that is before temperature, penalties and filters. targets int64 [rows]"""

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """A token a row: temperature, top-k, top-p, min-p, then a race among what is left
        (kernels/noise.py). May change `logits`. -> int64 [rows], on the device; NO_TOKEN for a row
        whose highest logit is infinite or that holds a NaN, never what is no token."""
