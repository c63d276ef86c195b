"""Row counts that steps on the CPU are padded to.

oneDNN compiles a GEMM for each row count and keeps the code: 0.6 MiB each, part of it for ever,
whatever its cache's capacity. Unpadded, ordinary traffic grows a server by 2.4 MiB per distinct
prompt length. A short list of row counts bounds that, and all of them run once before the KV budget
is measured. Spacing keeps padding cheap: a quarter of an octave up to 128 rows, 32 rows up to 512,
an eighth of an octave above.
"""

from __future__ import annotations


def padded_rows(rows: int) -> int:
    """The row count that a step of `rows` rows is padded to; 0 for 0."""
    below = 1 << max(rows - 1, 1).bit_length() - 1  # the octave is (below, 2 * below]
    step = max(2, min(below // 4, max(32, below // 8)))
    return -(-rows // step) * step


def row_counts(largest: int) -> list[int]:
    """Every row count that steps of up to `largest` rows run at."""
    return sorted({padded_rows(rows) for rows in range(1, largest + 1)})
