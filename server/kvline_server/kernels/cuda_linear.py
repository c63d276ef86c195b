"""Linears of one row on a GPU, fused with the norm before them or the sum after them.

Decoding one sequence reads every weight once a step, and the kernels between the GEMMs take as long
as small GEMMs. Here a layer's norms, its activation and its sums are part of the GEMMs. For more
rows cuBLAS is faster (docs/decisions/011).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.projection import Operand

OUTPUTS, INPUTS = 8, 512  # of a program, and of one iteration of its loop
ALIGN = 16  # of the numbers of inputs and outputs, for vector loads
ALIGNED = (0, 1, 3, 4, 5, 7)  # indices of the tensors, and of the number of inputs


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [rows, inputs] times weight [outputs, inputs] transposed can run here."""
    return len(x) == 1 and not any(n % ALIGN for n in weight.shape) and weight.is_contiguous()


def one_row(
    x: Operand,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
    added: bool = False,
) -> torch.Tensor:
    """Linears.row."""
    hidden, norm = x.rows, x.norm
    made = hidden.new_empty((1, len(weight) // (1 + gated))) if out is None else out
    variant = _variant(weight.dtype, norm is not None, gated, bias is not None, added)
    outputs = made.shape[1]
    programs = -(-outputs // OUTPUTS)
    # What a variant does not read may be any pointer.
    scale, eps = (hidden, 0.0) if norm is None else (norm.weight, norm.eps)
    shift = hidden if bias is None else bias
    launch(variant, programs, hidden, scale, eps, weight, shift, made, outputs, weight.shape[1])
    return made


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    yield _variant(dtype, True, True, False, False)
    for bias in (False, True):
        yield _variant(dtype, True, False, bias, False)
        yield _variant(dtype, False, False, bias, True)
        yield _variant(dtype, False, False, bias, False)  # a rank's term of a sum


def _variant(dtype: torch.dtype, norm: bool, gated: bool, bias: bool, added: bool) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, kind, "fp32", kind, kind, kind, "i32", "i32")
    constants = {"OUTPUTS": OUTPUTS, "INPUTS": INPUTS, "NORM": int(norm)}
    constants |= {"GATED": int(gated), "BIAS": int(bias), "ADD": int(added)}
    return Variant("one_row", arguments, ALIGNED, tuple(constants.items()))
