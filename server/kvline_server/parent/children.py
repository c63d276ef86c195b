"""Starts the HTTP processes and the engine's, each with a control socket to the parent."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvline_contract import listening
from kvline_contract.launch import LaunchConfig
from kvline_server.errors import InvalidFrame
from kvline_server.ipc import pixels, totals
from kvline_server.ipc.messages import Channel, Message
from kvline_server.options.arguments import (
    ChildArguments,
    EngineArguments,
    GrammarArguments,
    GrammarService,
    HttpArguments,
    RankArguments,
    SharedByRanks,
)
from kvline_server.options.clients import ClientLimits
from kvline_server.options.grammars import GrammarBounds
from kvline_server.options.options import Options

STREAM_SECONDS = 3.0  # until the control sockets of children that have ended are at their end

# The engine's heap is never trimmed, so that small blocks need no new memory from the kernel after
# Ready. Blocks of 2 MiB and more are mapped for each use: on the heap they would leave gaps that
# differ between two starts, and with them the KV budget (docs/decisions/027; device.compact_heap).
ENGINE_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


# An HTTP process returns the memory of a large body at once.
HTTP_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}

# Grammars that are dropped leave their memory to the next ones, or to the kernel.
GRAMMAR_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
GRAMMAR_BACKLOG = 64


@dataclass(eq=False, slots=True)
class Child:
    process: subprocess.Popen[bytes]
    channel: Channel
    # HTTP: receives the engine's socket. Rank 0: the HTTP ends of its sockets.
    others: list[socket.socket]
    heard: threading.Event = field(default_factory=threading.Event)  # all that it ever sent
    invalid: str = ""  # why nothing more is heard of it, though it may send

    def tell(self, message: Message) -> None:
        """Sends, unless it has ended, which the parent sees for itself."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def follow(self, handle: Callable[[Message], None]) -> None:
        """Calls `handle` with every message of the child, on a thread of its own."""

        def read() -> None:
            try:
                for message in self.channel.receive():
                    handle(message)
            except InvalidFrame as error:
                self.invalid = f"sent {error}"
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self.invalid = f"sent what could not be handled: {what}"
            finally:
                self.heard.set()

        threading.Thread(target=read, daemon=True).start()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def hand(self, engine: socket.socket) -> None:
        """Passes the HTTP process its socket to the engine, and closes it here."""
        with contextlib.suppress(OSError), engine:
            socket.send_fds(self.others[0], [b"e"], [engine.fileno()])


def hear_last_words(children: Iterable[Child]) -> None:
    """Waits until each message of followed children that have ended is handled. What they started
    themselves may keep a socket open, so not for long."""
    end = time.monotonic() + STREAM_SECONDS
    for child in children:
        child.heard.wait(max(0.0, end - time.monotonic()))


def listen(host: str, port: int, processes: int) -> list[socket.socket]:
    """A listener for each HTTP process, on one port. The kernel spreads connections over them by
    their addresses (docs/decisions/031). Raises OSError where another program has the port, also
    one that would share it."""
    alone = listening.listen(host, port)
    if processes == 1:
        return [alone]
    with alone:
        port = alone.getsockname()[1]
    return [listening.listen(host, port, reuse_port=True) for _ in range(processes)]


def share_pixels(launch: LaunchConfig, clients: ClientLimits, processes: int) -> list[int]:
    """Memory for images' pixels that each of so many HTTP processes shares with all ranks, also
    with one that is started again; none where text alone is served."""
    if launch.engine.images is None:
        return []
    nbytes = clients.of_each(processes).pixel_bytes
    return [pixels.create(nbytes) for _ in range(processes)]


def start_http(
    options: Options,
    clients: ClientLimits,
    listeners: list[socket.socket],
    grammars: GrammarService,
    pixel_fds: Sequence[int] = (),
) -> list[Child]:
    """A process for each listener; they share one count of what clients hold. `pixel_fds`: of each
    process, or none."""
    counted, processes = totals.create(), len(listeners)
    options = replace(options, clients=clients.of_each(processes))

    def start(index: int, listener: socket.socket) -> Child:
        def make(control_fd: int, others: list[int]) -> HttpArguments:
            return HttpArguments(
                options=options,
                control_fd=control_fd,
                handover_fd=others[0],
                listen_fd=listener.fileno(),
                totals_fd=counted,
                index=index,
                processes=processes,
                grammars=grammars.path,
                pixels_fd=pixel_fds[index] if pixel_fds else None,
            )

        fds = (listener.fileno(), counted, *pixel_fds[index : index + 1])
        return _spawn("kvline_server.http.process", make, HTTP_MALLOC, fds)

    started = [start(index, listener) for index, listener in enumerate(listeners)]
    os.close(counted)
    return started


def listen_for_grammars(path: Path) -> socket.socket:
    """To which HTTP and the engine connect for grammars, also while their process is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(GRAMMAR_BACKLOG)
    return listener


def start_grammars(
    options: Options, bounds: GrammarBounds, listener: socket.socket, rows: int
) -> Child:
    """`rows`: a memfd for masks, which the engine has too."""

    def make(control_fd: int, others: list[int]) -> GrammarArguments:
        return GrammarArguments(
            options=options,
            control_fd=control_fd,
            listen_fd=listener.fileno(),
            rows_fd=rows,
            bounds=bounds,
        )

    fds = (listener.fileno(), rows)
    return _spawn("kvline_server.grammars.process", make, GRAMMAR_MALLOC, fds, 0)


def start_engine(
    options: Options,
    http_processes: int,
    ranks: int = 1,
    folder: Path | None = None,
    grammars: GrammarService | None = None,
    pixel_fds: Sequence[int] = (),
) -> list[Child]:
    """A process for each rank, in their order. Several meet in `folder`, each has a socket to rank
    0, and they share memory for steps. `pixel_fds`: of each HTTP process, or none."""
    with ExitStack() as passed:
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        for end in itertools.chain(*pairs):
            passed.enter_context(end)
        shared, fds, root = None, [ours.fileno() for ours, _ in pairs], os.getpid()
        if folder is not None:
            steps = os.memfd_create("kvline-steps")
            passed.callback(os.close, steps)
            shared = SharedByRanks(ranks, folder, steps)

        def engine(control_fd: int, others: list[int]) -> EngineArguments:
            return EngineArguments(
                options=options,
                control_fd=control_fd,
                http_fds=others,
                root=root,
                ranks=shared,
                rank_fds=fds,
                grammars=grammars,
                pixel_fds=list(pixel_fds),
            )

        every = (*fds, shared.steps_fd) if shared is not None else ()
        every += (*(() if grammars is None else (grammars.rows_fd,)), *pixel_fds)
        started = [
            _spawn("kvline_server.engine_process", engine, ENGINE_MALLOC, every, http_processes)
        ]
        if shared is not None:
            started += [
                start_rank(options, rank, shared, end, root, http_processes, pixel_fds)
                for rank, (_, end) in enumerate(pairs, 1)
            ]
    return started


def start_rank(
    options: Options,
    rank: int,
    shared: SharedByRanks,
    end: socket.socket,
    root: int,
    http_processes: int = 1,
    pixel_fds: Sequence[int] = (),
) -> Child:
    """`end`: of its socket to rank 0."""

    def make(control_fd: int, others: list[int]) -> RankArguments:
        return RankArguments(
            options=options,
            control_fd=control_fd,
            rank=rank,
            http_processes=http_processes,
            ranks=shared,
            engine_fd=end.fileno(),
            root=root,
            pixel_fds=list(pixel_fds),
        )

    fds = (end.fileno(), shared.steps_fd, *pixel_fds)
    return _spawn("kvline_server.engine_process.rank", make, ENGINE_MALLOC, fds, 0)


def _spawn(
    module: str,
    make: Callable[[int, list[int]], ChildArguments],
    environment: dict[str, str],
    fds: tuple[int, ...],
    others: int = 1,
) -> Child:
    ours, theirs = socket.socketpair()
    pairs = [socket.socketpair() for _ in range(others)]
    with ExitStack() as passed:
        for end in (theirs, *(other for _, other in pairs)):
            passed.enter_context(end)
        control_fd, other_fds = theirs.fileno(), [other.fileno() for _, other in pairs]
        process = subprocess.Popen(
            [sys.executable, "-m", module, make(control_fd, other_fds).dumps()],
            pass_fds=(control_fd, *other_fds, *fds),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to the parent alone, which drains.
            process_group=0,
        )
    return Child(process, Channel(ours), [ours for ours, _ in pairs])
