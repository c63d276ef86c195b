"""Arguments of the processes that the parent starts."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from kvline_server.options.grammars import GrammarBounds
from kvline_server.options.options import Options


class ChildArguments(msgspec.Struct, kw_only=True):
    """Of a process that the parent starts: JSON, as its one argument."""

    options: Options
    control_fd: int  # socket to the parent

    def dumps(self) -> str:
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


class HttpArguments(ChildArguments, kw_only=True):
    """Its options have the limits of one of the HTTP processes."""

    handover_fd: int  # receives the socket to the engine
    listen_fd: int
    totals_fd: int  # of what all HTTP processes hold
    index: int  # of this process
    processes: int
    grammars: Path | None = None  # socket of the process that compiles them
    pixels_fd: int | None = None  # its memory for images' pixels; None: text alone is served


class GrammarService(msgspec.Struct, frozen=True):
    """Where grammars are compiled and masks filled, also by a successor of the process."""

    path: Path  # of its socket
    rows_fd: int  # shared memory for masks


class SharedByRanks(msgspec.Struct):
    """What the processes of a model's ranks share."""

    count: int
    folder: Path  # where they meet, empty at first
    steps_fd: int  # shared memory for the steps


class EngineArguments(ChildArguments, kw_only=True):
    """Of rank 0."""

    http_fds: list[int]  # sockets, one to each HTTP process
    root: int  # pid of the process tree whose memory counts
    ranks: SharedByRanks | None = None  # None: one rank
    rank_fds: list[int] = []  # sockets, one to each other rank, in their order
    grammars: GrammarService | None = None  # None: no request follows one
    pixel_fds: list[int] = []  # of each HTTP process, in their order; none: text alone is served


class RankArguments(ChildArguments, kw_only=True):
    """Of each other rank."""

    rank: int  # from 1
    http_processes: int  # as rank 0 has them: settings depend on them
    ranks: SharedByRanks
    engine_fd: int  # socket to rank 0
    root: int
    pixel_fds: list[int] = []  # as rank 0 has them


class GrammarArguments(ChildArguments, kw_only=True):
    """Of the process that starts those of grammars."""

    listen_fd: int  # to which HTTP and the engine connect
    rows_fd: int  # shared memory for masks
    bounds: GrammarBounds
