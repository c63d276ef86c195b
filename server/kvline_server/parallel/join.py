"""How ranks come together once each has loaded its part of the model: only then do they wait for
each other, as one that cannot load ends the start."""

from __future__ import annotations

from collections.abc import Sequence

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


def join(
    local: Local,
    group: Meeting,
    links: Sequence[Link],
    steps: Steps,
    patience: float = ANSWER_SECONDS,
) -> tuple[Ranks, tuple[int, ...]]:
    """Rank 0's part. -> and the bytes that were free on each other rank's device before it loaded.
    Raises DeviceFailure where devices differ, and RankLost."""
    free = tuple(_same(local, link, _answer(link, LOAD_SECONDS)) for link in links)
    for link in links:
        link.send(Call("meet"), patience)
    group.meet()
    for link in links:
        _answer(link, patience)
    return Ranks(local, group, links, steps, patience), free


def follow(local: Local, group: Meeting, link: Link, steps: Steps, free: int) -> Follower:
    """Another rank's part, with a link to rank 0. `free`: bytes, before it loaded."""
    link.send(Answer([local.device.limit, free], local.device.name), ANSWER_SECONDS)
    message = link.receive(LOAD_SECONDS)
    assert message == Call("meet"), "what rank 0 says first"
    group.meet()
    link.send(Answer(), ANSWER_SECONDS)
    return Follower(local, group, link, steps)


def _answer(link: Link, seconds: float) -> Answer:
    answer = link.receive(seconds)
    if not isinstance(answer, Answer):
        raise link.silent(seconds)
    return answer


def _same(local: Local, link: Link, answer: Answer) -> int:
    """-> what was free there"""
    (limit, free), name = answer.numbers, answer.text
    device = local.device
    if (limit, name) != (device.limit, device.name):
        raise DeviceFailure(
            f"the devices of a pod's ranks must be equal: rank 0 has {device.name} with "
            f"{device.limit // MIB} MiB, rank {link.rank} has {name} with {limit // MIB} MiB"
        )
    return free
