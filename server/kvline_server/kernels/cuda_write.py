"""Between the QKV GEMM and attention on a GPU: QK norm, rotary embedding, write to the KV cache.

Padding rows write to slot 0, in the dummy page, so a captured graph may run with more rows than
the step has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.attention import Heads, SlotMapping
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

FP8 = torch.float8_e4m3fn  # of a KV cache
DIMS = (64, 128, 256)
QUERIES = (8, 16, 32, 64, 128)  # padded head counts of the variants; a model uses the next larger
ROTARY = 32  # elements of a head are rotated, or a multiple: half of them are read by sixteen
KEYS = (1, 2, 4, 8, 16, 32, 64)
WIDEST = 128 * 128  # numbers of all queries of a row, padded: a program has them in registers
POINTERS = (0, 5, 8, 9)  # indices of heads, rope, keys, values: torch allocations or whole pages
STRIDES = (1, 10, 11)  # indices of strides, which are multiples of the head size
PAIRS = 14  # index of the pairs that are rotated


def check(queries: int, keys: int, dim: int, rotary: int = 0) -> None:
    """Raises RuntimeError for heads that none of the prebuilt kernels takes, of which the first
    `rotary` elements are rotated."""
    if dim not in DIMS:
        raise RuntimeError(f"head size {dim}, kernels support {', '.join(map(str, DIMS))}")
    most = min(QUERIES[-1], WIDEST // dim)
    if queries > most or keys > KEYS[-1]:
        raise RuntimeError(
            f"{queries} heads of queries and {keys} of keys, kernels support at most {most} and "
            f"{KEYS[-1]} of size {dim}"
        )
    if rotary % ROTARY:
        raise RuntimeError(
            f"{rotary} elements of a head are rotated, kernels support multiples of {ROTARY}"
        )


def write(heads: Heads, rope: torch.Tensor | None, mapping: SlotMapping, cache: KVLayer) -> None:
    """Norms and rotates queries and keys, writes keys and values; to an fp8 cache by their scales.
    rope float32 [positions, elements of a head that are rotated]: all cosines, then all sines"""
    rows, _, dim = heads.fused.shape
    normed = heads.q_norm is not None and heads.k_norm is not None
    padded = _padded(heads.queries, QUERIES), _padded(heads.keys, KEYS)
    fp8 = cache.keys.dtype == FP8
    variant = _variant(heads.fused.dtype, *padded, dim, normed, fp8)
    # Kernels do not read what is not there; any pointer will do.
    norms = [heads.fused if n is None else n for n in (heads.q_norm, heads.k_norm)]
    pairs = 0 if rope is None else rope.shape[1] // 2
    table = heads.fused if rope is None else rope
    where = (table, mapping.positions, mapping.slots, cache.keys, cache.values)
    sizes = (cache.keys.stride(0), cache.keys.stride(1), heads.queries, heads.keys, pairs)
    inverses = (1.0 / cache.scales.keys, 1.0 / cache.scales.values) if fp8 else ()
    queries = heads.fused, heads.fused.stride(0)
    launch(variant, rows, *queries, *norms, heads.eps, *where, *sizes, *inverses)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that `write` launches."""
    for queries, keys, dim in itertools.product(QUERIES, KEYS, DIMS):
        for normed, fp8 in itertools.product((False, True), repeat=2):
            if keys <= queries and queries * dim <= WIDEST:
                yield _variant(dtype, queries, keys, dim, normed, fp8)


def _padded(heads: int, known: tuple[int, ...]) -> int:
    return next(n for n in known if n >= heads)


def _variant(
    dtype: torch.dtype, queries: int, keys: int, dim: int, normed: bool, fp8: bool
) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    kept = f"*{TRITON_TYPES[FP8]}" if fp8 else kind
    arguments = (kind, "i32", kind, kind, "fp32", "*fp32", "*i32", "*i64", kept, kept)
    inverses = ["fp32"] * 2 if fp8 else []
    constants = {
        "Q_PADDED": queries,
        "KV_PADDED": keys,
        "DIM": dim,
        "PAGE": PAGE_SIZE,
        "NORM": int(normed),
    }
    aligned = tuple(sorted((*POINTERS, *STRIDES, PAIRS)))
    kernel = "write_fp8" if fp8 else "write"
    every = (*arguments, *["i32"] * 5, *inverses)
    return Variant(kernel, every, aligned, tuple(constants.items()))
