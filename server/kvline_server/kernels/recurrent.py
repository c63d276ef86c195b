"""Recurrent layers: of each sequence they keep a state of a fixed size in the place of keys and
values. The gated delta rule (Gated DeltaNet, arXiv 2412.06464), Mamba2's scan (arXiv 2405.21060).

A state has two parts: the last inputs of a short causal convolution, and a matrix for each head. It
is in a slot of a layer's pool. A step says of each sequence which slot it reads, or that it starts
from zero: a slot is never cleared, so whatever an earlier sequence left in it, NaN too, must not
reach the results. Sequences are planned once a step, in host memory, and its layers use the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.kernels.layout import Snapshots as Snapshots
from kvline_server.kernels.projection import Norm
from kvline_server.memory.state_shape import States as States
from kvline_server.memory.states import BOUNDARY, DUMMY_SLOT

# Rows of which a prompt's states are computed at once. A prompt whose chunk of a step begins at a
# multiple of it is computed as if it had been whole: to the bit where sums have the same order.
CHUNK = BOUNDARY
DUMMY = DUMMY_SLOT  # of padding: written, never read


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences in the order of their rows. Rows behind the last one are padding; so are sequences
    in the slot DUMMY, of which a captured step may have many. No slot is written that another
    sequence reads in the same step."""

    starts: NDArray[np.int32]  # [sequences + 1], from 0; each has a row or more
    slots: NDArray[np.int64]  # [sequences], written; one sequence each, but for DUMMY
    # [sequences], read: its own, where it goes on; a snapshot's, where its first rows are known
    # and need not be copied; DUMMY: none, it starts from zero.
    sources: NDArray[np.int64]
    snapshots: Snapshots | None = None
    # Of decodes with draft tokens, which come first, with those of one row: the slot that is
    # written behind each of their rows, the last of which is in `slots` too. A sequence's first
    # one may be what it reads. [rows]; None: slots are written behind last rows alone.
    each: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Convolution:
    """Causal, of each channel by itself, with silu behind it."""

    weight: torch.Tensor  # [channels, width], that of a row itself last
    bias: torch.Tensor | None = None  # [channels]


@dataclass(frozen=True, slots=True)
class Decay:
    """What a head's state decays by in a row: e to the power of -e^a_log softplus(x + dt_bias), of
    a projected x. Both float32 [heads]: rounded, every decay is another one, and errors add up."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """A layer's own weights, of a rank's heads. Value head h reads key head h / (value heads / key
    heads), rounded down."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: Convolution  # channels: queries, keys, values
    decay: Decay  # of value heads


@dataclass(frozen=True, slots=True)
class Scan:
    """A Mamba2 layer's own weights, of a rank's heads. Head h is in group h / (heads / groups),
    rounded down, whose B and C its group shares."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    convolution: Convolution  # channels: x of all heads, B of all groups, C of all groups
    decay: Decay
    skip: torch.Tensor  # float32 [heads], Mamba2's D: x times it is added to the output


class Recurrent(ABC):
    @property
    @abstractmethod
    def plan_in_place(self) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
        """As `plan`, of decodes in a captured graph, which reads slots and sources when it runs,
        the slot DUMMY where a row is padding. Both int64 [rows], on the device. None: nothing is
        captured."""

    @abstractmethod
    def plan(self, sequences: Sequences) -> Any:
        """Prepares a step's recurrent layers, which all use the result."""

    @abstractmethod
    def delta_rule(
        self,
        qkv: torch.Tensor,
        ba: torch.Tensor,
        layer: DeltaRule,
        states: States,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convolution, then in each row, of the keys and queries with a length of 1 each:
        S <- e^g S; S <- S + beta k (v - S^T k)^T; o = S^T q / sqrt(key dim), with beta =
        sigmoid(b) and the decay e^g of a. Chunk by chunk where there are many rows.
        qkv [rows, 2 * key_heads * key_dim + value_heads * value_dim], ba [rows, 2 * value_heads],
        b before a -> [rows, value_heads * value_dim], in `out` if given; padding rows are finite"""

    @abstractmethod
    def scan(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        layer: Scan,
        states: States,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convolution, then in each row S <- e^g S + delta x B^T; y = S C + skip x, with delta =
        softplus(dt + dt_bias) and the decay e^g of dt. Delta has no bounds: transformers'
        Nemotron-H clamps it in prompts and not while decoding, its authors nowhere.
        xbc [rows, heads * head_dim + 2 * groups * state_dim], dt [rows, heads]
        -> [rows, heads * head_dim], in `out` if given; padding rows are finite"""

    @abstractmethod
    def norm_then_gate(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, activation: str
    ) -> torch.Tensor:
        """RMS norm of each head, then times `activation`, silu or sigmoid, of the gate: behind a
        delta rule. In float32. x, gate [rows, heads * dim], the norm's weight [dim] -> as x"""

    @abstractmethod
    def gate_then_norm(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, groups: int
    ) -> torch.Tensor:
        """Times silu of the gate, then RMS norm of each of `groups` equal parts of a row: behind a
        scan. In float32. x, gate, and the norm's weight [rows, width] and [width] -> as x"""
