"""Starting the HTTP and the engine process, each with a control socket to the parent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvline_server.engine.messages import Channel, Message
from kvline_server.options import Options

# The engine's heap keeps what it once took, so that a step after Ready asks the kernel for
# nothing new: what was measured stays what is used. Blocks of 32 MiB and more are mapped apart.
ENGINE_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


@dataclass(frozen=True, slots=True)
class Child:
    process: subprocess.Popen[bytes]
    channel: Channel

    def tell(self, message: Message) -> None:
        """Sends, unless it has ended, which the parent sees for itself."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def follow(self, handle: Callable[[Message], None]) -> None:
        """Hands every message of the child to `handle`, on a thread of its own."""

        def read() -> None:
            with contextlib.suppress(OSError):
                for message in self.channel.receive():
                    handle(message)

        threading.Thread(target=read, daemon=True).start()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start_http(options: Options, listener: socket.socket) -> Child:
    fd = listener.fileno()
    extra = ["--listen-fd", str(fd), "--api-key-file", str(options.key)]
    return _spawn("kvline_server.http.process", options, extra, {}, (fd,))


def start_engine(options: Options) -> Child:
    extra = ["--state-dir", str(options.state_dir), "--root", str(os.getpid())]
    for flag, value in (
        ("--record", options.record),
        ("--memory", options.memory),
        ("--threads", options.threads),
    ):
        if value is not None:
            extra += [flag, str(value)]
    return _spawn("kvline_server.engine.process", options, extra, ENGINE_MALLOC, ())


def _spawn(
    module: str,
    options: Options,
    extra: list[str],
    environment: dict[str, str],
    fds: tuple[int, ...],
) -> Child:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, "--config", str(options.config)]
    command += ["--socket", str(options.socket), "--control-fd", str(theirs.fileno()), *extra]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs.fileno(), *fds),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return Child(process, Channel(ours))
