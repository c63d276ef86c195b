"""Runs the benchmarks of docs/performance.md: python bench [NAME ...]; by default all CPU ones.

Each prints a table and appends results with hardware and versions to bench/results/results.jsonl.
Compared systems alternate within one run and the best of three counts, because machines are noisy.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]
sys.path += [str(ROOT / "tests" / name) for name in ("e2e", "integration", "server", "suite")]

# Modules; benchmarks of the GPU run only by name.
CPU = {"throughput": "throughput", "chunks": "chunks", "sizing": "search", "writes": "writes"}
GPU = (
    "attention",
    "gemm",
    "experts",
    "offline",
    "steps",
    "gaps",
    "unchunked",
    "prefill",
    "serving",
    "chat",
    "decode",
    "highest",
    "startup",
    "soak",
    "parallel",
    "exchange",
    "windows",
    "structured",
    "recurrent",
)


def main(names: list[str]) -> int:
    known = CPU | {
        name: name
        for name in (
            *GPU,
            "reads",
            "lengths",
            "plot",
            "rollouts",
            "scale",
            "quality",
            "spread",
            "hits",
            "reuse",
            "snapshots",
            "ngram",
            "host",
            "grammars",
            "dequantise",
        )
    }
    known |= {
        "test-run": "test_run",
        "demo": "demo_run",
        "http": "http_memory",
        "http-cpu": "http_cpu",
        "http-tools": "http_tools",
        "chat-tools": "chat_tools",
        "images": "image_figures",
        "images-cpu": "images_cpu",
        "image-pixels": "image_pixels",
        "tower": "towers",
        "lm-eval": "lm_eval_scores",
    }
    unknown = [n for n in names if n not in known]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or list(CPU):
        importlib.import_module(known[name]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
