"""The local cluster by hand: python tests/cluster build | up | down | kubectl …"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import binaries
from local import ClusterError, LocalCluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("command", choices=("build", "up", "down", "enter"))
    parser.add_argument("--name", default="demo")
    parser.add_argument("--mode", choices=("api", "control", "node"), default="node")
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def run(arguments: argparse.Namespace) -> int:
    cluster = LocalCluster(arguments.name, arguments.mode)
    if arguments.command == "build":
        binaries.build(print)
    elif arguments.command == "up":
        cluster.up(print)
        print(f"export KUBECONFIG={cluster.kubeconfig}")
    elif arguments.command == "down":
        cluster.down()
    else:
        return cluster.enter(arguments.rest).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
