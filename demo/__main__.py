"""make demo: from a bare machine to a model served with a validated KV budget.

CLUSTER=local    a one-node Kubernetes of our own, in a network namespace (the default; root)
CLUSTER=current  the cluster of your kubeconfig's context; needs REGISTRY=, to push images to, or
                 LOAD=, the command that takes a file of images into its nodes
BASE=, BUILDER=  for that one: how images are built, as in publish.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "build" / "demo.json"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]

import binaries  # noqa: E402
from clusters import Cluster, LocalDemo, choose  # noqa: E402
from errors import ClusterError  # noqa: E402
from install import install  # noqa: E402
from story import Story  # noqa: E402


def main() -> int:
    # In a pipe too, lines come out when they are printed, in order with those of kubectl.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Of make: what it installs first is a part of it.
    began = float(os.environ.get("KVLINE_BEGAN", time.time()))
    try:
        cluster = choose(os.environ.get("CLUSTER", "local"))
        if sys.argv[1:] == ["down"]:
            cluster.down()
            print("the demo is gone; images, binaries, logs and the model stay in the cache")
            return 0
        built = binaries.are_built()
        run(cluster)
    except ClusterError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; make demo goes on where it was, make demo-down cleans up")
        return 130
    seconds = time.time() - began
    if isinstance(cluster, LocalDemo):
        write(seconds, built)
    print(f"\n(the whole demo took {seconds:.0f} s)")
    return 0


def write(seconds: float, built: bool) -> None:
    """For `python bench demo`, which records it."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"seconds": round(seconds, 1), "programs_cached": built}))


def run(cluster: Cluster) -> None:
    story = Story(cluster)
    story.step("tools and space", cluster.check)
    story.step("the demo model", cluster.model)
    story.step("a cluster", cluster.up)
    story.step("images of operator and server", cluster.images)
    story.step("CRD and operator", partial(install, cluster))
    story.step("a claim that holds the model", cluster.claim)
    story.apply_sample()
    story.show_budget()
    story.chat()
    story.call()
    story.scale()
    story.pass_gate()
    story.fail_gate()
    story.refuse()
    story.goodbye()


if __name__ == "__main__":
    sys.exit(main())
