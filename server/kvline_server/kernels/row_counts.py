"""The row counts that steps are padded to: one ladder for captured graphs, GEMM trials and warm-up.

A GPU has a graph of each count, which takes time at the start and memory. oneDNN compiles a GEMM
for each and keeps the code: 0.6 MiB each, part of it for ever, whatever its cache's capacity, so a
CPU runs them all before the KV budget is measured (docs/decisions/021).
"""

from __future__ import annotations

# Of these GEMMs are tried: few rows, decodes, and many decodes with some prompts in whole waves.
# More of them gained too little for their time (docs/performance.md, GEMMs).
TRIED = {1, 2, 4, 8, 64, 128, 192, 256, 1024, 2048, 3072}


def padded(rows: int, dense: bool = False) -> int:
    """The row count of a step of `rows` rows; 0 for 0. Up to 128 rows a CPU's are twice as `dense`:
    it computes padding as slowly as rows, where a GPU waits for the weights. A single row is padded
    there. From 128 on the ladder is one: 32 rows up to 512, then an eighth of an octave or 512."""
    below = 1 << max(rows - 1, 1).bit_length() - 1  # the octave is (below, 2 * below]
    least, part = (2, below // 4) if dense else (min(below, 8), below // 2)
    step = max(least, min(part, 32), min(below // 8, 512))
    return -(-rows // step) * step


def compiled(largest: int) -> list[int]:
    """Every row count that a CPU's steps of up to `largest` rows run at."""
    return sorted({padded(rows, dense=True) for rows in range(1, largest + 1)})


def captured(largest: int) -> list[int]:
    """The same of a GPU, where no step has more rows than the largest: buffers end with it."""
    return sorted({min(padded(rows), largest) for rows in range(1, largest + 1)})


def tried(largest: int) -> list[int]:
    """Those to try GEMMs of, a full prompt chunk's with them."""
    return [rows for rows in captured(largest) if rows in TRIED or rows == largest]
