"""Draws docs/images/h200.svg from bench/results, beside the vLLM and SGLang figures.

Needs matplotlib, which has an environment of its own; `python bench plot` makes it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "f563bae"  # the results shown are from this commit
# vLLM 0.26.0 and SGLang 0.5.17: given, not measured by this project's commands.
ANCHORS: dict[str, dict[str, tuple[float, float]]] = {
    "llama8b": {
        "kv-tokens": (891_392, 906_067),
        "r512": (37_187, 36_571),
        "r512lp-top0": (34_538, 31_866),
        "r512lp-top20": (0, 18_941),
        "nano": (10_016, 9_873),
    },
    "qwen06b": {
        "kv-tokens": (1_160_720, 1_165_042),
        "r512": (122_940, 135_937),
        "r512lp-top0": (103_738, 90_919),
        "r512lp-top20": (0, 29_895),
        "nano": (23_663, 21_225),
    },
}
TITLES = {
    "kv-tokens": "KV tokens",
    "r512": "r512, tokens/s",
    "r512lp-top0": "with logprobs",
    "r512lp-top20": "with top-20",
    "nano": "nano, output tokens/s",
}


def run() -> None:
    from paths import CACHE
    from tools import ensure_environment

    python = ensure_environment(CACHE / "plot", ROOT / "requirements" / "plot.txt", print)
    subprocess.run([str(python), __file__], check=True)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvline"  # reproducible output
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, len(TITLES), figsize=(13, 5), layout="constrained")
    for name, axes in zip(ANCHORS, rows, strict=True):
        for kind, axis in zip(TITLES, axes, strict=True):
            _panel(axis, name, kind)
    target = ROOT / "docs" / "images" / "h200.svg"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    print(target.relative_to(ROOT))


def _panel(axis: Any, name: str, kind: str) -> None:
    values = [_value(f"{kind}-{name}")]
    values += ANCHORS[name][kind]
    bars = axis.bar(["kvline", "vLLM", "SGLang"], values, color=["#1f6f8b", "#b8bfc6", "#d8c9a8"])
    axis.bar_label(bars, [f"{v:,.0f}" if v else "not given" for v in values], fontsize=7)
    axis.set_title(f"{name}: {TITLES[kind]}", fontsize=9)
    axis.set_yticks([])
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(y=0.15)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _value(name: str) -> float:
    lines = (ROOT / "bench" / "results" / "results.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["name"] == name and r["commit"] == COMMIT]
    if not found:
        raise SystemExit(f"plot: no result {name} at {COMMIT} in bench/results")
    return float(found[-1]["value"])


if __name__ == "__main__":
    draw()
