"""Between QKV GEMM and attention on a GPU: norms, rotary turn, keys and values to the cache.

Pads go to slot 0, the dummy page, so a captured segment runs for more rows than a step has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.interface import Heads, KVLayer, Where
from kvline_server.memory.pages import PAGE_SIZE

DIMS = (64, 128)
QUERIES = (8, 16, 32, 64, 128)  # heads that a program holds, of which a model has so many or fewer
KEYS = (1, 2, 4, 8, 16, 32, 64)
POINTERS = (0, 5, 8, 9)  # heads, rope, keys, values: torch's own allocations or whole pages
STRIDES = (1, 10, 11)  # multiples of the head size


def check(queries: int, keys: int) -> None:
    """Raises RuntimeError for more heads than any program holds."""
    if queries > QUERIES[-1] or keys > KEYS[-1]:
        most = f"at most {QUERIES[-1]} and {KEYS[-1]}"
        raise RuntimeError(f"{queries} heads of queries and {keys} of keys, kernels are for {most}")


def write(heads: Heads, rope: torch.Tensor, where: Where, cache: KVLayer) -> None:
    """rope float32 [positions, dim]: all cosines, then all sines"""
    rows, _, dim = heads.fused.shape
    normed = heads.q_norm is not None and heads.k_norm is not None
    variant = _variant(
        heads.fused.dtype, _padded(heads.queries, QUERIES), _padded(heads.keys, KEYS), dim, normed
    )
    launch(
        variant,
        rows,
        heads.fused,
        heads.fused.stride(0),
        heads.q_norm if heads.q_norm is not None else heads.fused,
        heads.k_norm if heads.k_norm is not None else heads.fused,
        heads.eps,
        rope,
        where.positions,
        where.slots,
        cache.keys,
        cache.values,
        cache.keys.stride(0),
        cache.keys.stride(1),
        heads.queries,
        heads.keys,
    )


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All that `write` may ask for."""
    for queries, keys, dim in itertools.product(QUERIES, KEYS, DIMS):
        for normed in (False, True):
            if keys <= queries:
                yield _variant(dtype, queries, keys, dim, normed)


def _padded(heads: int, known: tuple[int, ...]) -> int:
    return next(n for n in known if n >= heads)


def _variant(dtype: torch.dtype, queries: int, keys: int, dim: int, normed: bool) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, "i32", kind, kind, "fp32", "*fp32", "*i32", "*i64", kind, kind)
    constants = {
        "Q_PADDED": queries,
        "KV_PADDED": keys,
        "DIM": dim,
        "PAGE": PAGE_SIZE,
        "NORM": int(normed),
    }
    aligned = tuple(sorted(POINTERS + STRIDES))
    return Variant("write", (*arguments, *["i32"] * 4), aligned, tuple(constants.items()))
