"""How rank 0 makes one executor of all ranks, once each has loaded its part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvline_server.errors import DeviceFailure
from kvline_server.ipc.messages import RankLoaded
from kvline_server.ipc.pixels import SharedPixels
from kvline_server.kernels.group import Group
from kvline_server.memory.device import MIB
from kvline_server.parallel.executor import Local
from kvline_server.parallel.follow import Follower
from kvline_server.parallel.link import Link
from kvline_server.parallel.ranks import ANSWER_SECONDS, Ranks
from kvline_server.parallel.wire import Steps

LOAD_SECONDS = 7 * 86400.0  # the longest spec.startupSeconds; the parent ends a start that hangs


@dataclass(frozen=True, slots=True)
class Joined:
    executor: Ranks
    free_before: tuple[int, ...]  # bytes of each rank, before the exchange and its weights
    collectives: int  # bytes that the exchange takes of a GPU, at most
    encoder: int  # bytes that passes of images take of a device, at most
    pace: int  # tokens times layers of images that each rank encodes in a second


def join(
    local: Local,
    group: Group,
    links: Sequence[Link],
    steps: Steps,
    loaded: RankLoaded,
    patience: float = ANSWER_SECONDS,
) -> Joined:
    """Rank 0's part, which has loaded this. Raises DeviceFailure where ranks differ,
    RankLost and InvalidFrame."""
    others = [_loaded(link) for link in links]
    for link, other in zip(links, others, strict=True):
        _check_same(loaded, link.rank, other)
    every = [loaded, *others]
    free = tuple(each.free_before for each in every)
    taken = max(each.collectives for each in every)
    encoder, pace = max(each.encoder for each in every), min(each.pace for each in every)
    pids = tuple(each.pid for each in every)
    executor = Ranks(local, group, links, steps, patience, pids)
    return Joined(executor, free, taken, encoder, pace)


def follow(
    local: Local,
    group: Group,
    link: Link,
    steps: Steps,
    loaded: RankLoaded,
    pixels: Sequence[SharedPixels] = (),
) -> Follower:
    """Another rank's part, with a link to rank 0, and the `pixels` of each HTTP process."""
    link.send(loaded, ANSWER_SECONDS)
    return Follower(local, group, link, steps, pixels)


def _loaded(link: Link) -> RankLoaded:
    message = link.receive(LOAD_SECONDS)
    if message is None:
        raise link.silent(LOAD_SECONDS)
    if not isinstance(message, RankLoaded):
        raise link.unexpected(message)
    return message


def _check_same(first: RankLoaded, rank: int, other: RankLoaded) -> None:
    """Ranks that differ would exchange other numbers than the others wait for."""
    if (first.limit, first.device) != (other.limit, other.device):
        raise DeviceFailure(
            f"the devices of a pod's ranks must be equal: rank 0 has {first.device} with "
            f"{first.limit // MIB} MiB, rank {rank} has {other.device} with "
            f"{other.limit // MIB} MiB"
        )
    if first.kernels != other.kernels:
        raise DeviceFailure(
            f"the kernels of a pod's ranks must be equal: rank 0 has {first.kernels}, rank {rank} "
            f"has {other.kernels}; a warning says why"
        )
    if first.fingerprint != other.fingerprint:
        raise DeviceFailure(
            f"rank 0 and rank {rank} differ in the model's files, the settings, the driver, a "
            "library, or the way they exchange, which must be equal on a pod's ranks"
        )
