"""make demo-gpu: from a bare machine with an NVIDIA GPU to gated rollouts on it.

STEPS=       names of gpu_story.py, with commas; all by default. The cluster stays up between calls
OUT_DIR=     where texts, the page and figures go; dist/demo-gpu by default
REHEARSAL=1  the same steps on a node without a GPU, with a model that a CPU can serve
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent)]
sys.path[1:1] = [str(ROOT / "tests" / name) for name in ("gpu_node", "cluster")]
sys.path.append(str(ROOT / "server"))  # kvline_image, which the GPU node's images need

from errors import ClusterError  # noqa: E402
from gpu_cluster import GpuCluster, Rehearsal  # noqa: E402
from gpu_figures import Figures  # noqa: E402
from gpu_run import Run  # noqa: E402
from gpu_shape import LLAMA8B, REHEARSAL  # noqa: E402
from gpu_story import STEPS, play  # noqa: E402
from paths import CACHE  # noqa: E402


def main() -> int:
    # In a pipe too, lines come out when they are printed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    started = time.monotonic()
    rehearsal = os.environ.get("REHEARSAL") == "1"
    try:
        cluster: GpuCluster
        # Only where there is a GPU: what its node is made of is not needed for a rehearsal.
        cluster = Rehearsal() if rehearsal else importlib.import_module("gpu_demo").GpuDemo()
        if sys.argv[1:] == ["down"]:
            cluster.down()
            print("the demo is gone; images, programs, logs and models stay in the cache")
            return 0
        play(prepared(cluster, rehearsal), steps())
    except ClusterError as error:
        print(f"\ndemo-gpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo-gpu: stopped; STEPS= goes on at a step, make demo-gpu-down cleans up")
        return 130
    print(f"\n(it took {time.monotonic() - started:.0f} s)")
    return 0


def prepared(cluster: GpuCluster, rehearsal: bool) -> Run:
    name = "demo-gpu-rehearsal" if rehearsal else "demo-gpu"
    out = Path(os.environ.get("OUT_DIR") or ROOT / "dist" / name)
    figures = Figures(cluster, CACHE / name / "figures.json", out / "results.jsonl")
    return Run(cluster, REHEARSAL if rehearsal else LLAMA8B, figures, out)


def steps() -> list[str]:
    words = os.environ.get("STEPS", "")
    return [word for word in words.split(",") if word] or list(STEPS)


if __name__ == "__main__":
    sys.exit(main())
