"""Row counts that the CPU's steps are padded to.

oneDNN compiles a GEMM for each row count it meets and keeps the code: 0.6 MiB each, part of it for
ever, whatever its cache's capacity. With a count of its own for every prompt length, ordinary
traffic grows a server by 2.4 MiB a length. A short ladder of counts bounds that, and all of it can
be met before the KV budget is measured. Pads cost least where rungs follow the speed of small
steps: a quarter of an octave up to 128 rows, 32 rows up to 512, an eighth of an octave above.
"""

from __future__ import annotations


def rung(rows: int) -> int:
    """The row count that a step of so many rows is padded to; none is padded to none."""
    below = 1 << max(rows - 1, 1).bit_length() - 1  # the octave is (below, 2 * below]
    step = max(2, min(below // 4, max(32, below // 8)))
    return -(-rows // step) * step


def rungs(largest: int) -> list[int]:
    """Every row count that steps of up to `largest` rows can run at."""
    return sorted({rung(rows) for rows in range(1, largest + 1)})
