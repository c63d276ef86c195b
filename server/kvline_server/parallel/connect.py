"""Connects the ranks of a model, by what their devices can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed

from kvline_contract.launch import Device
from kvline_server.errors import RankLost
from kvline_server.kernels.group import Group

NO_PEER_ACCESS = (
    "the GPUs cannot map each other's memory, or not change it atomically: using NCCL, which takes "
    "more of their memory and is slower"
)


def connect(
    device: Device,
    rank: int,
    ranks: int,
    folder: Path,
    elements: int,
    dtype: torch.dtype,
    warn: Callable[[str], None],
) -> Group:
    """Waits for the other ranks, which call the same. `folder` is empty at first; no hidden states
    that are summed have more than so many elements. `warn` gets a text where the fastest way is not
    there. Raises RankLost where they do not come."""
    if device is Device.CPU:
        from kvline_server.parallel.gloo import GlooGroup

        return GlooGroup(rank, ranks, folder)
    from kvline_server.memory.cuda import reachable
    from kvline_server.parallel.nccl import NcclGroup
    from kvline_server.parallel.symmetric import SymmetricGroup

    try:
        if reachable(ranks):
            return SymmetricGroup(rank, ranks, folder, elements, dtype)
        warn(NO_PEER_ACCESS)
        return NcclGroup(rank, ranks, folder, elements, dtype)
    except torch.distributed.DistStoreError as error:
        line = str(error).splitlines()[0]
        text = f"rank {rank} of {ranks} waits for another, in vain: {line:.160}"
        raise RankLost(text) from error
