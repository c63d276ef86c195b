"""The process of grammars: started with the others and ended with them, and started again where it
has ended. It neither ends the pod nor keeps it from Ready for long."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvline_server.errors import ConfigInvalid
from kvline_server.ipc.messages import GrammarsReady, Message
from kvline_server.options.arguments import GrammarService
from kvline_server.options.grammars import GrammarBounds
from kvline_server.options.options import Options
from kvline_server.parent.children import Child, listen_for_grammars, start_grammars
from kvline_server.parent.engine import signal_name

FOLDER, SOCKET = "grammars-", "socket"
LONGEST_FOLDER = 74  # bytes of a path: Linux takes 107 of a socket's, and 34 are behind it
LAST_PLACE = Path("/tmp")  # noqa: S108 - a folder with a random name is made there
READY_SECONDS = 60.0  # that a start waits for it at most, so that its memory is measured
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before it is started again
CALM_SECONDS = 60.0  # after which one that ends did not end soon


class GrammarProcess:
    def __init__(self, options: Options, bounds: GrammarBounds, log: Callable[[str], None]) -> None:
        """Starts it. HTTP and the engine connect to `service`, also to its successors."""
        self._options, self._bounds, self._log = options, bounds, log
        self._folder, self._listener = socket_folder(options.state_dir)
        self.service = GrammarService(self._folder / SOCKET, os.memfd_create("kvline-masks"))
        self._began_at = time.monotonic()
        self._settled = False
        self._pause = FIRST_PAUSE
        self._ended_at: float | None = None
        self.child = self._start()

    @property
    def settled(self) -> bool:
        """Whether no start needs to wait for it any more: its memory is taken, or it has ended, or
        takes too long."""
        return self._settled or time.monotonic() > self._began_at + READY_SECONDS

    def tend(self) -> None:
        """Starts it again where it has ended, after a pause. One that sends what is no message is
        ended: whether it is ready would never be known."""
        if self.child.invalid:
            self.child.kill()
        code, now = self.child.process.poll(), time.monotonic()
        if code is None:
            return
        if self._ended_at is None:
            if now > self._began_at + CALM_SECONDS:
                self._pause = FIRST_PAUSE
            self._ended_at, self._settled = now, True
            how = f"ended with {signal_name(code) if code < 0 else f'code {code}'}"
            again = f"it is started again in {self._pause:g} s"
            self._log(f"warning: the process of grammars {self.child.invalid or how}; {again}")
        elif now > self._ended_at + self._pause:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._start_again(now)

    def close(self) -> None:
        self.child.kill()
        self.child.channel.connection.close()
        self._listener.close()
        os.close(self.service.rows_fd)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_again(self, now: float) -> None:
        try:
            child = self._start()
        except OSError as error:  # a node without processes or memory to spare
            self._ended_at = now
            again = f"tried again in {self._pause:g} s"
            self._log(f"warning: the process of grammars is not started: {error}; {again}")
            return
        self.child.channel.connection.close()
        self._began_at, self._ended_at, self.child = now, None, child

    def _start(self) -> Child:
        child = start_grammars(self._options, self._bounds, self._listener, self.service.rows_fd)
        child.follow(self._hear)
        return child

    def _hear(self, message: Message) -> None:
        if isinstance(message, GrammarsReady):
            self._settled = True


def socket_folder(state: Path) -> tuple[Path, socket.socket]:
    """A new one for its socket, whose path must be short, in the first of several places that has
    sockets. -> the folder, and what listens. Raises ConfigInvalid."""
    places = dict.fromkeys((state, Path(tempfile.gettempdir()), LAST_PLACE))
    why = dict[Path, str]()
    for where in places:
        if len(os.fsencode(where)) >= LONGEST_FOLDER:
            why[where] = f"its path is longer than {LONGEST_FOLDER - 1} bytes"
            continue
        try:
            return _opened(where)
        except OSError as error:
            why[where] = error.strerror or str(error)
    tried = ", ".join(f"{where} ({text})" for where, text in why.items())
    raise ConfigInvalid(f"the grammars' socket can be in no folder: {tried}; set TMPDIR to another")


def _opened(where: Path) -> tuple[Path, socket.socket]:
    """Removes folders of parents on this host that were killed: another one may share the place,
    and a socket answers on its own host alone. Raises OSError."""
    prefix = f"{FOLDER}{zlib.crc32(socket.gethostname().encode()):08x}-"
    for old in where.glob(f"{prefix}*"):
        if _is_dead(old / SOCKET):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
    try:
        return folder, listen_for_grammars(folder / SOCKET)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_dead(path: Path) -> bool:
    """Whether nobody listens to a socket. One that is not bound yet is being made."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return False
