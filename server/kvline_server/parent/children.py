"""Starts the HTTP and the engine process, each with a control socket to the parent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvline_server.messages import Channel, Message
from kvline_server.options import ClientLimits, Options

# The engine's heap is never trimmed, so that small blocks need no new memory from the kernel after
# Ready. Blocks of 2 MiB and more are mapped for each use: on the heap they would leave gaps that
# differ between two starts, and with them the KV budget (docs/decisions/027; device.compact_heap).
ENGINE_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


# The HTTP process returns the memory of a large body at once.
HTTP_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


@dataclass(frozen=True, slots=True)
class Child:
    process: subprocess.Popen[bytes]
    channel: Channel
    other: socket.socket  # HTTP: receives the engine's socket; engine: the HTTP end of that socket

    def tell(self, message: Message) -> None:
        """Sends, unless it has ended, which the parent sees for itself."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def follow(self, handle: Callable[[Message], None]) -> None:
        """Calls `handle` with every message of the child, on a thread of its own."""

        def read() -> None:
            with contextlib.suppress(OSError):
                for message in self.channel.receive():
                    handle(message)

        threading.Thread(target=read, daemon=True).start()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def hand(self, engine: socket.socket) -> None:
        """Passes the HTTP process its socket to the engine, and closes it here."""
        with contextlib.suppress(OSError), engine:
            socket.send_fds(self.other, [b"e"], [engine.fileno()])


def start_http(options: Options, clients: ClientLimits, listener: socket.socket) -> Child:
    fd = listener.fileno()
    extra = ["--listen-fd", str(fd), "--api-key-file", str(options.key)]
    extra += ["--tls-dir", str(options.tls)]
    extra += ["--limits", json.dumps(asdict(clients))]
    return _spawn("kvline_server.http.process", options, "--handover-fd", extra, HTTP_MALLOC, (fd,))


def start_engine(options: Options) -> Child:
    extra = ["--state-dir", str(options.state_dir), "--root", str(os.getpid())]
    for flag, value in (
        ("--record", options.record),
        ("--memory", options.memory),
        ("--threads", options.threads),
    ):
        if value is not None:
            extra += [flag, str(value)]
    return _spawn("kvline_server.engine_process", options, "--http-fd", extra, ENGINE_MALLOC, ())


def _spawn(
    module: str,
    options: Options,
    other_flag: str,
    extra: list[str],
    environment: dict[str, str],
    fds: tuple[int, ...],
) -> Child:
    ours, theirs = socket.socketpair()
    other, their_other = socket.socketpair()
    with theirs, their_other:
        command = [sys.executable, "-m", module, "--config", str(options.config)]
        command += ["--control-fd", str(theirs.fileno())]
        command += [other_flag, str(their_other.fileno()), *extra]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), their_other.fileno(), *fds),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to the parent alone, which drains.
            process_group=0,
        )
    return Child(process, Channel(ours), other)
