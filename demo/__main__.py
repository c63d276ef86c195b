"""make demo: from a bare machine to a model served with a validated KV budget.

CLUSTER=local    a one-node Kubernetes of our own, in a network namespace (the default; root)
CLUSTER=current  the cluster of your kubeconfig's context; needs REGISTRY=, to push images to, or
                 LOAD=, the command that takes a file of images into its nodes
BASE=, BUILDER=  for that one: how images are built, as in publish.py
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]

from clusters import Cluster, choose  # noqa: E402
from errors import ClusterError  # noqa: E402
from install import install  # noqa: E402
from story import Story  # noqa: E402


def main() -> int:
    # In a pipe too, lines come out when they are printed, in order with those of kubectl.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    started = time.monotonic()
    try:
        cluster = choose(os.environ.get("CLUSTER", "local"))
        if sys.argv[1:] == ["down"]:
            cluster.down()
            print("the demo is gone; images, binaries, logs and the model stay in the cache")
            return 0
        run(cluster)
    except ClusterError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; make demo goes on where it was, make demo-down cleans up")
        return 130
    print(f"\n(the whole demo took {time.monotonic() - started:.0f} s)")
    return 0


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
    story.scale()
    story.pass_gate()
    story.fail_gate()
    story.refuse()
    story.goodbye()


if __name__ == "__main__":
    sys.exit(main())
