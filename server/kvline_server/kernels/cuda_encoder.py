"""What is between the GEMMs and the attention of encoders on a GPU, by our Triton kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.encoder import DIM_STEP, HEAD_DIMS, MAX_NORM_WIDTH, Angles, Norm

BLOCK = 2048  # padded elements of heads that a program copies
BLOCKS = tuple(
    1 << n for n in range(9, MAX_NORM_WIDTH.bit_length())
)  # of rows, filled to a power of two
ALIGN = 16
TILE_ROWS = {64: 192, 128: 128}  # of a work tile of fa3, by head size
TILES_APART = 4096  # of a head; beyond it all heads share one schedule
PARTS = 8  # arrays of a plan, each aligned


def pad_heads(qkv: torch.Tensor, heads: int, angles: Angles | None) -> torch.Tensor:
    """Queries and keys rotated, and each head padded to a size that attention takes, with zeros.
    [rows, 3 * heads * dim], contiguous -> [rows, 3, heads, padded]"""
    dim = qkv.shape[1] // (3 * heads)
    wide = padded(dim)
    if angles is None and wide == dim:
        return qkv.view(len(qkv), 3, heads, dim)
    out = qkv.new_empty(len(qkv), 3, heads, wide)
    # Without angles the kernel does not read them; any pointer will do.
    cos, sin = (qkv, qkv) if angles is None else (angles.cos, angles.sin)
    variant = _pad_variant(qkv.dtype, angles is not None, wide)
    programs = 3 * len(qkv) * -(-heads * wide // BLOCK)
    launch(variant, programs, qkv, cos, sin, out, heads, dim // DIM_STEP)
    return out


def unpad_heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` elements of each head. [rows, heads, padded] -> [rows, heads * dim]"""
    rows, heads, wide = x.shape
    if wide == dim:
        return x.flatten(1)
    out = x.new_empty(rows, heads * dim)
    programs = rows * -(-heads * wide // BLOCK)
    launch(_unpad_variant(x.dtype, wide), programs, x, out, heads, dim // DIM_STEP)
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


def padded(dim: int) -> int:
    """The head size that attention takes for this one."""
    return next(wide for wide in HEAD_DIMS if dim <= wide)


def workspace(rows: int, sequences: int, heads: int, dim: int, processors: int) -> int:
    """Bytes that fa3's plan of so many sequences takes at most, which more of either never lower:
    a work tile has seven numbers, and heads have tiles of their own until there are too many.
    Source: PrefillSM90Plan of FlashInfer 0.6.18."""
    tiles = -(-rows // TILE_ROWS[padded(dim)]) + sequences - 1
    return 7 * 4 * heads * min(tiles, TILES_APART) + 4 * (processors + 1) + PARTS * ALIGN


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched for encoders."""
    for wide in HEAD_DIMS:
        yield from (_pad_variant(dtype, turned, wide) for turned in (False, True))
        yield _unpad_variant(dtype, wide)
    for block in BLOCKS:
        for added, centred, fits in itertools.product((False, True), repeat=3):
            yield _norm_variant(dtype, added, centred, block, fits)


def _pad_variant(dtype: torch.dtype, turned: bool, wide: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    angles = "*fp32" if turned else kind
    constants = (("TURN", int(turned)), ("PADDED", wide), ("BLOCK", BLOCK))
    return Variant("pad_heads", (kind, angles, angles, kind, "i32", "i32"), (0, 3), constants)


def _unpad_variant(dtype: torch.dtype, wide: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    constants = (("PADDED", wide), ("BLOCK", BLOCK))
    return Variant("unpad_heads", (kind, kind, "i32", "i32"), (0, 1), constants)


def _norm_variant(
    dtype: torch.dtype, added: bool, centred: bool, width: int, aligned: bool
) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    block = next(each for each in BLOCKS if width <= each)
    constants = (("ADDED", int(added)), ("CENTRED", int(centred)), ("BLOCK", block))
    where = (0, 1, 2, 3, 4, 5) if aligned else ()
    arguments = (*[kind] * 5, "i32", "fp32")
    return Variant("add_then_norm", arguments, where, constants, warps=max(1, block // 512))
