"""What is between the GEMMs and the attention of encoders on a GPU, by our Triton kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.encoder import DIM_STEP, DIMS, WIDEST, Angles, Norm

BLOCK = 2048  # places of heads that a program copies
BLOCKS = tuple(1 << n for n in range(9, WIDEST.bit_length()))  # of rows, filled to a power of two
ALIGN = 16


def spread(qkv: torch.Tensor, heads: int, angles: Angles | None) -> torch.Tensor:
    """Queries and keys rotated, and each head in places that attention takes, zeros behind it.
    [rows, 3 * heads * dim], contiguous -> [rows, 3, heads, places]"""
    dim = qkv.shape[1] // (3 * heads)
    wide = places(dim)
    if angles is None and wide == dim:
        return qkv.view(len(qkv), 3, heads, dim)
    out = qkv.new_empty(len(qkv), 3, heads, wide)
    # Without angles the kernel does not read them; any pointer will do.
    cos, sin = (qkv, qkv) if angles is None else (angles.cos, angles.sin)
    variant = _spread_variant(qkv.dtype, angles is not None, wide)
    programs = 3 * len(qkv) * -(-heads * wide // BLOCK)
    launch(variant, programs, qkv, cos, sin, out, heads, dim // DIM_STEP)
    return out


def join(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` elements of each head. [rows, heads, places] -> [rows, heads * dim]"""
    rows, heads, wide = x.shape
    if wide == dim:
        return x.flatten(1)
    out = x.new_empty(rows, heads * dim)
    programs = rows * -(-heads * wide // BLOCK)
    launch(_join_variant(x.dtype, wide), programs, x, out, heads, dim // DIM_STEP)
    return out


def norm(x: torch.Tensor, by: Norm, added: torch.Tensor | None) -> torch.Tensor:
    """Encoder.norm."""
    (rows, width), out = x.shape, torch.empty_like(x)
    kind = added is not None, by.bias is not None
    variant = _norm_variant(x.dtype, *kind, width, width % ALIGN == 0)
    # Kernels do not read what is not there; any pointer will do.
    more, bias = (x if added is None else added), (by.weight if by.bias is None else by.bias)
    launch(variant, rows, x, more, by.weight, bias, out, width, by.eps)
    return out


def places(dim: int) -> int:
    return next(wide for wide in DIMS if dim <= wide)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched for encoders."""
    for wide in DIMS:
        yield from (_spread_variant(dtype, turned, wide) for turned in (False, True))
        yield _join_variant(dtype, wide)
    for block in BLOCKS:
        for added, centred, fits in itertools.product((False, True), repeat=3):
            yield _norm_variant(dtype, added, centred, block, fits)


def _spread_variant(dtype: torch.dtype, turned: bool, wide: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    angles = "*fp32" if turned else kind
    constants = (("TURN", int(turned)), ("PLACES", wide), ("BLOCK", BLOCK))
    return Variant("spread_heads", (kind, angles, angles, kind, "i32", "i32"), (0, 3), constants)


def _join_variant(dtype: torch.dtype, wide: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    constants = (("PLACES", wide), ("BLOCK", BLOCK))
    return Variant("join_heads", (kind, kind, "i32", "i32"), (0, 1), constants)


def _norm_variant(
    dtype: torch.dtype, added: bool, centred: bool, width: int, aligned: bool
) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    block = next(each for each in BLOCKS if width <= each)
    constants = (("ADDED", int(added)), ("CENTRED", int(centred)), ("BLOCK", block))
    where = (0, 1, 2, 3, 4, 5) if aligned else ()
    arguments = (*[kind] * 5, "i32", "fp32")
    return Variant("add_then_norm", arguments, where, constants, warps=max(1, block // 512))
