"""The other ranks of an engine in this process, where it runs on several GPUs."""

from __future__ import annotations

import atexit
import os
import socket
from pathlib import Path
from typing import Any

from kvline_contract.launch import LaunchConfig
from kvline_server.options.arguments import SharedByRanks
from kvline_server.options.options import Options
from kvline_server.parallel.link import Link
from kvline_server.parent import children

GPUS = int(os.environ.get("KVLINE_BENCH_GPUS", "1"))


def label(name: str, gpus: int = GPUS) -> str:
    """Of a model in the names of results."""
    return name if gpus == 1 else f"{name}-tp{gpus}"


def start(launch: LaunchConfig, folder: Path) -> dict[str, Any]:
    """Starts them in this folder, until this process ends. -> options of rank 0's start"""
    count = launch.tensor_parallel
    if count == 1:
        return {}
    config = folder / "launch.json"
    config.write_text(launch.dumps())
    meeting = folder / "ranks"
    meeting.mkdir()
    shared = SharedByRanks(count, meeting, os.memfd_create("steps"))
    links = []
    for rank in range(1, count):
        ours, theirs = socket.socketpair()
        with theirs:
            options = Options(config=config, state_dir=folder)
            child = children.start_rank(options, rank, shared, theirs, os.getpid())
        atexit.register(child.kill)
        links.append(Link(ours, rank))
    return {"ranks": shared, "links": links}
