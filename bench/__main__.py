"""The figures of docs/performance.md: python bench [name …]; without a name, all of them.

Each prints a table and appends a line to bench/results/results.jsonl with what it ran on. Compared
sides alternate within one run, and the best of three counts, because these machines are noisy.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]

import chunks  # noqa: E402
import search  # noqa: E402
import throughput  # noqa: E402
import writes  # noqa: E402

BENCHES = {
    "throughput": throughput.run,
    "chunks": chunks.run,
    "sizing": search.run,
    "writes": writes.run,
}


def main(names: list[str]) -> int:
    unknown = [n for n in names if n not in BENCHES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    for name in names or list(BENCHES):
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
