"""How ranks come together once each has loaded its part of the model: only then do they wait for
each other, as one that cannot load ends the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvline_server.errors import DeviceFailure
from kvline_server.memory.device import MIB
from kvline_server.messages import Answer, Call
from kvline_server.parallel.executor import Local
from kvline_server.parallel.follow import Follower
from kvline_server.parallel.link import Link
from kvline_server.parallel.meeting import Meeting
from kvline_server.parallel.ranks import ANSWER_SECONDS, Ranks
from kvline_server.parallel.wire import Steps

LOAD_SECONDS = 3600.0  # the parent ends a start without progress long before


@dataclass(frozen=True, slots=True)
class Joined:
    executor: Ranks
    free_before: tuple[int, ...]  # bytes of each rank before its weights
    collectives: int  # bytes that the exchange takes of a GPU, at most


def join(
    local: Local,
    group: Meeting,
    links: Sequence[Link],
    steps: Steps,
    free_before: int,
    patience: float = ANSWER_SECONDS,
) -> Joined:
    """Rank 0's part; `free_before` bytes were free before its weights. Raises DeviceFailure where
    devices differ, and RankLost."""
    free = [free_before, *(_same(local, link, _answer(link, LOAD_SECONDS)) for link in links)]
    for link in links:
        link.send(Call("meet"), patience)
    taken = [_meet(local, group), *(_answer(link, patience).numbers[0] for link in links)]
    return Joined(Ranks(local, group, links, steps, patience), tuple(free), max(taken))


def follow(local: Local, group: Meeting, link: Link, steps: Steps, free_before: int) -> Follower:
    """Another rank's part, with a link to rank 0."""
    limit, name = local.device.limit, local.device.name
    link.send(Answer([limit, free_before], name), ANSWER_SECONDS)
    message = link.receive(LOAD_SECONDS)
    assert message == Call("meet"), "what rank 0 says first"
    link.send(Answer([_meet(local, group)]), ANSWER_SECONDS)
    return Follower(local, group, link, steps)


def _meet(local: Local, group: Meeting) -> int:
    """-> bytes of the device that it took, where the device does not count them itself"""
    before = local.device.used()
    group.meet()
    return max(0, local.device.used() - before) if local.device.gpu else 0


def _answer(link: Link, seconds: float) -> Answer:
    answer = link.receive(seconds)
    if not isinstance(answer, Answer):
        raise link.silent(seconds)
    return answer


def _same(local: Local, link: Link, answer: Answer) -> int:
    """-> bytes that were free there before the weights"""
    (limit, free), name = answer.numbers, answer.text
    device = local.device
    if (limit, name) != (device.limit, device.name):
        raise DeviceFailure(
            f"the devices of a pod's ranks must be equal: rank 0 has {device.name} with "
            f"{device.limit // MIB} MiB, rank {link.rank} has {name} with {limit // MIB} MiB"
        )
    return free
