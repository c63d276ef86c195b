"""Recurrent layers on a GPU: our Triton kernels, and the plan that all layers of a step use.

In a captured step each sequence has one row, and the plan reads slots and sources where the graph
finds them; padding has the slot DUMMY, whose rows become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvline_server.kernels import cuda_convolution, cuda_delta_rule, cuda_scan, tiles
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.cuda_convolution import FewRows, Tiles
from kvline_server.kernels.pinned import upload
from kvline_server.kernels.projection import Norm
from kvline_server.kernels.recurrent import DeltaRule, Recurrent, Scan, Sequences, States

HEADS = (8, 4, 2, 1)  # of a program of norm_then_gate
DIM = 128
WIDTHS = tuple(1 << n for n in range(9, 15))  # of groups, filled to a power of two
ALIGN = 16


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int  # that are no padding
    few: FewRows | None
    tiled: tuple[Tiles, ...]


class CudaRecurrent(Recurrent):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: dict[int, torch.Tensor] = {}

    def plan(self, sequences: Sequences) -> Plan:
        assert sequences.each is None, "no kernel here writes a state behind each row"
        few, tiled = tiles.few(sequences), list(tiles.tiled(sequences))
        arrays: list[np.ndarray] = [] if few is None else [few.spans, few.slots, few.sources]
        for each in tiled:
            arrays += [each.tiles, each.tile_sources, each.chains, each.sources]
            arrays += [each.stops, each.slots]
        placed = iter(self._there(arrays))
        return Plan(
            int(sequences.starts[-1]),
            None if few is None else FewRows(next(placed), next(placed), next(placed)),
            tuple(Tiles(each.rows, each.most, *(next(placed) for _ in range(6))) for each in tiled),
        )

    def plan_in_place(self, slots: torch.Tensor, sources: torch.Tensor) -> Plan:
        rows = len(slots)
        if rows not in self._spans:
            at = torch.arange(rows, dtype=torch.int32, device=self.device)
            self._spans[rows] = torch.stack((at, at + 1), dim=1)
        return Plan(rows, FewRows(self._spans[rows], slots, sources), ())

    def _there(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        flat = upload(self.device, *arrays) if arrays else []
        return [each.view(array.shape) for each, array in zip(flat, arrays, strict=True)]

    def delta_rule(
        self,
        qkv: torch.Tensor,
        ba: torch.Tensor,
        layer: DeltaRule,
        states: States,
        plan: Plan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = _out(qkv, layer.value_heads * layer.value_dim, plan, out)
        qkv = _aligned(qkv)
        if plan.few is not None:
            cuda_delta_rule.rows(qkv, ba, layer, states, plan.few, made)
        for each in plan.tiled:
            cuda_delta_rule.tiled(qkv, ba, layer, states, each, made)
        return _into(made, out)

    def scan(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        layer: Scan,
        states: States,
        plan: Plan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = _out(xbc, layer.heads * layer.head_dim, plan, out)
        xbc = _aligned(xbc)
        if plan.few is not None:
            cuda_scan.rows(xbc, dt, layer, states, plan.few, made)
        for each in plan.tiled:
            cuda_scan.tiled(xbc, dt, layer, states, each, made)
        return _into(made, out)

    def norm_then_gate(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, activation: str
    ) -> torch.Tensor:
        x, gate, dim = x.contiguous(), _aligned(gate), len(norm.weight)
        heads = x.shape[1] // dim
        each = next(n for n in HEADS if heads % n == 0)
        parts, out = heads // each, torch.empty_like(x)
        kinds = x.dtype, norm.weight.dtype
        variant = _norm_variant(*kinds, dim, each, int(activation == "sigmoid"))
        given = (x, gate, gate.stride(0), norm.weight, out, parts, norm.eps)
        launch(variant, len(x) * parts, *given)
        return out

    def gate_then_norm(
        self, x: torch.Tensor, gate: torch.Tensor, norm: Norm, groups: int
    ) -> torch.Tensor:
        x, gate = x.contiguous(), _aligned(gate)
        width, out = x.shape[1] // groups, torch.empty_like(x)
        variant = _group_norm_variant(x.dtype, norm.weight.dtype, width)
        sizes = (gate.stride(0), norm.weight, out, groups, width, norm.eps)
        launch(variant, len(x) * groups, x, gate, *sizes)
        return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """For vector loads of rows: as it is, or a copy."""
    fits = not any(n % ALIGN for n in (x.data_ptr(), x.stride(0))) and x.stride(1) == 1
    return x if fits else x.contiguous()


def _out(x: torch.Tensor, width: int, plan: Plan, out: torch.Tensor | None) -> torch.Tensor:
    """What kernels write: `out` where that is aligned. Its padding is zeros."""
    fits = out is not None and _aligned(out) is out
    made = out if out is not None and fits else x.new_empty((len(x), width))
    if len(x) > plan.rows:
        made[plan.rows :] = 0
    return made


def _into(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return made if out is None or out is made else out.copy_(made)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched for recurrent layers."""
    yield from cuda_convolution.variants(dtype)
    yield from cuda_delta_rule.variants(dtype)
    yield from cuda_scan.variants(dtype)
    for weight in (dtype, torch.float32):
        for each in HEADS:
            for sigmoid in (0, 1):
                yield _norm_variant(dtype, weight, DIM, each, sigmoid)
        for width in WIDTHS:
            yield _group_norm_variant(dtype, weight, width)


def _norm_variant(
    dtype: torch.dtype, weight: torch.dtype, dim: int, each: int, sigmoid: int
) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, kind, "i32", f"*{TRITON_TYPES[weight]}", kind, "i32", "fp32")
    constants = (("SIGMOID", sigmoid), ("DIM", dim), ("EACH", each))
    return Variant("norm_then_gate", arguments, (0, 1, 2, 3, 4), constants, warps=each)


def _group_norm_variant(dtype: torch.dtype, weight: torch.dtype, width: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, kind, "i32", f"*{TRITON_TYPES[weight]}", kind, "i32", "i32", "fp32")
    block = 1 << max(9, (width - 1).bit_length())
    constants, warps = (("BLOCK", block),), min(16, block // 256)
    return Variant("gate_then_norm", arguments, (0, 1, 2, 3, 4, 6), constants, warps=warps)
