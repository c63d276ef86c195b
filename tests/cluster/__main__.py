"""The local cluster by hand: python tests/cluster build | is-built | up | down | enter …

build makes all that the tests' clusters need, so that it is seen and not waited for in silence.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_node"))
sys.path.insert(0, str(Path(__file__).parent))

import binaries
import build
import earlier
import model
import node_programs
import tools
from local import ClusterError, LocalCluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("command", choices=("build", "is-built", "up", "down", "enter"))
    parser.add_argument("--name", default="demo")
    parser.add_argument("--mode", choices=("api", "control", "node"), default="node")
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def say(line: str) -> None:
    print(f"   {line}", flush=True)


def run(arguments: argparse.Namespace) -> int:
    cluster = LocalCluster(arguments.name, arguments.mode)
    if arguments.command == "is-built":
        return int(not binaries.are_built())
    if arguments.command == "build":
        tools.ensure_root()
        tools.ensure_packages(say)
        # In parallel: compiling needs processors, the rest disk and network.
        with ThreadPoolExecutor() as pool:
            halves = [pool.submit(half) for half in (_programs, _model_and_images)]
        for half in halves:
            half.result()
    elif arguments.command == "up":
        cluster.up(say)
        print(f"export KUBECONFIG={cluster.kubeconfig}")
    elif arguments.command == "down":
        cluster.claim_use()
        cluster.down()
    else:
        return cluster.enter(arguments.rest).returncode
    return 0


def _programs() -> None:
    binaries.build(say)
    for name in ("helm", "kube-score", "kubeconform", "promtool"):
        binaries.ensure(name, say)
    node_programs.build(say)


def _model_and_images() -> None:
    model.ensure(say)
    build.build(say)
    earlier.build(say)


if __name__ == "__main__":
    sys.exit(main())
