"""The figures of the GPU story: kept between its processes, recorded as benchmarks are, and printed
beside their bars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import ClusterError
from gpu_cluster import GpuCluster
from paths import ROOT


@dataclass(frozen=True)
class Figure:
    text: str
    unit: str
    bar: float
    goal: float

    def verdict(self, value: float) -> str:
        less = self.unit == "s"
        return next(
            (
                text
                for text, bound in (("goal", self.goal), ("bar", self.bar))
                if (value <= bound if less else value >= bound)
            ),
            "missed",
        )


NODE_READY = "gpu-node-ready-s"
APPLY_READY = "gpu-apply-ready-s-llama8b"
RECORDED_READY = "gpu-recorded-ready-s-llama8b"
STATUS_OF_BARE = "gpu-status-of-bare-llama8b"
SERVICE_OF_HTTP = "gpu-service-of-http-llama8b"
ROLLBACK_GAP = "gpu-rollback-gap-s"
ROLLOUT_GAP = "gpu-rollout-gap-s"
POD_DELETED = "gpu-pod-deleted-s"
FIGURES = {
    NODE_READY: Figure("packed parts to node Ready with its GPU allocatable", "s", 15, 10),
    APPLY_READY: Figure("kubectl apply to Ready, first time", "s", 12, 9),
    RECORDED_READY: Figure("container start to Ready, from a record", "s", 8, 6),
    STATUS_OF_BARE: Figure("KV tokens in status / on the bare machine", "ratio", 0.995, 0.999),
    SERVICE_OF_HTTP: Figure("r512 through the Service / bare HTTP", "ratio", 0.97, 0.99),
    ROLLBACK_GAP: Figure("a bad revision, Recreate: seconds without an answer", "s", 24, 18),
    ROLLOUT_GAP: Figure("a good revision, Recreate: seconds without an answer", "s", 12, 9),
    POD_DELETED: Figure("pod deleted to another one Ready", "s", 12, 9),
}


@dataclass(frozen=True)
class Figures:
    """`state` outlives the process; `results` gets a line for each figure."""

    cluster: GpuCluster
    state: Path
    results: Path

    def keep(self, name: str, value: float | str) -> None:
        """Keeps what a later step compares with."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.state.write_text(json.dumps({**self._all(), name: value}, indent=1))

    def kept(self, name: str) -> Any:
        """None where no step has kept it."""
        return self._all().get(name)

    def _all(self) -> dict[str, Any]:
        return dict(json.loads(self.state.read_text())) if self.state.is_file() else {}

    def record(self, name: str, value: float) -> None:
        figure = FIGURES[name]
        self.keep(name, value)
        print(f"      {figure.text}: {value:.4g} {figure.unit}  ({name})")
        line: dict[str, Any] = {"name": name, "value": value, "unit": figure.unit}
        line |= {"gpu": self._gpu(), "command": "make demo-gpu"}
        # By an interpreter that has kvline's packages, as benchmarks do.
        command = [self.cluster.python, "bench/record.py", json.dumps(line)]
        environment = {**os.environ, **self.cluster.environment}
        environment.setdefault("KVLINE_BENCH_RESULTS", str(self.results))
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ClusterError(f"bench/record.py: {done.stderr.strip()[-500:]}")

    def _gpu(self) -> str | None:
        if not self.cluster.gpus or shutil.which("nvidia-smi") is None:
            return None
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]

    def table(self) -> None:
        """All that are kept, of earlier processes too."""
        values = self._all()
        rows = [("figure", "value", "bar", "goal", "")]
        for name, figure in FIGURES.items():
            known = name in values
            value = f"{values[name]:.4g}" if known else "-"
            # The bars are of one H200: a CPU's figure shows only that it is measured.
            verdict = figure.verdict(values[name]) if known and self.cluster.gpus else ""
            rows.append((figure.text, value, f"{figure.bar:g}", f"{figure.goal:g}", verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        print()
        for row in rows:
            print("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
