"""The engine's connection to the process that fills masks. For one thread; it waits for the masks
of a step, and for those no longer than its deadline.

What goes wrong ends the sequences that follow a grammar, each with a reason, and nothing else: the
process is replaced, and serves those that begin then.
"""

from __future__ import annotations

import mmap
import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvline_server.errors import InvalidFrame
from kvline_server.grammars import messages
from kvline_server.grammars.messages import Advance, Attach, Attached, Begin, End, Filled, Wanted
from kvline_server.ipc.frames import Received
from kvline_server.options.grammars import STEP_SECONDS

LATE = "the masks of a step took longer than {:g} s"
ENDED = "the process that fills masks ended while it worked on this request"
STARTING = "the process that fills masks is starting"
GREETING_SECONDS = 0.05  # that a sequence waits for a process that has just been connected to
RETRY_SECONDS = 0.1  # between attempts to connect


@dataclass(frozen=True, slots=True)
class Masks:
    """What came of the sequences of a step; their masks are in `Matchers.table`."""

    finished: frozenset[int]  # that nothing but an end token may follow
    failed: dict[int, str]  # and why: they have no mask, and never will


class Matchers:
    """`begin` and `end` sequences; in each step `ask` for the masks of some, and `wait`."""

    def __init__(self, path: str, rows_file: int, rows: int, seconds: float = STEP_SECONDS) -> None:
        """`path`: of the socket to which the process listens; `rows_file`: a memfd that it shares,
        for `rows` masks; `seconds`: that a step waits for them."""
        self.table: NDArray[np.int32] = np.empty((0, 0), np.int32)  # [rows, words]
        self._path, self._file, self._rows, self._seconds = path, rows_file, rows, seconds
        self._socket: socket.socket | None = None
        self._received = Received()
        self._ready = False  # the process serves this engine
        self._serves_none = False  # its model's tokenizer is not one of those that grammars know
        self._tried_at = 0.0  # to connect
        self._greeted = False  # whether a sequence has waited for what this connection reaches
        self._begun: dict[int, str] = {}  # sequences; why one has failed, empty where it has not
        self._asked: list[int] = []  # sequences
        self._step = 0
        self._filled = Filled(0, [], [])  # the last one

    def attach(self, seconds: float) -> bool:
        """Waits until the process serves this engine, or says that it serves none, for so many
        seconds at most."""
        end = time.monotonic() + seconds
        while not self.ready() and (left := end - time.monotonic()) > 0:
            if self._serves_none:
                break
            if not self._receive(min(left, RETRY_SECONDS)):
                time.sleep(min(left, RETRY_SECONDS))
        return self._ready

    def ready(self) -> bool:
        """Whether the process serves this engine. Connects to one that was replaced, and waits for
        nothing."""
        if self._socket is None:
            self._connect()
        self._receive(0.0)
        return self._ready

    def begin(self, sequence: int, key: bytes) -> None:
        """A sequence whose text follows a grammar that HTTP has had compiled."""
        ready = self.ready() or self._greet()
        self._begun[sequence] = "" if ready else STARTING
        if ready:
            self._send(Begin(sequence, key))

    def end(self, sequence: int) -> None:
        """One that has ended, for whatever reason."""
        if self._begun.pop(sequence, None) == "":
            self._send(End(sequence))

    def ask(self, wanted: Iterable[Wanted]) -> None:
        """For the masks of a step, of each sequence once."""
        every = list(wanted)
        self._asked = [each.sequence for each in every]
        self._step += 1
        begun = self._begun
        self._send(Advance(self._step, [w for w in every if begun.get(w.sequence) == ""]))

    def wait(self) -> Masks:
        """For the step that was asked for."""
        end = time.monotonic() + self._seconds
        while self._ready and self._filled.step != self._step:
            left = max(0.0, end - time.monotonic())
            if not self._receive(left) and not left:  # once more where this process was kept off
                self._lose(LATE.format(self._seconds))
        begun, filled = self._begun, self._filled
        if filled.step == self._step:
            begun |= {id: why for id, why in filled.failed if id in begun}
        failed = {id: why for id in self._asked if (why := begun.get(id, ENDED))}
        return Masks(frozenset(filled.finished) - failed.keys(), failed)

    def close(self) -> None:
        self._lose(ENDED)

    def _greet(self) -> bool:
        """Once a connection: a process that starts or is busy would stall the engine for each
        sequence."""
        if self._socket is None or self._greeted:
            return False
        self._greeted = True
        return self.attach(GREETING_SECONDS)

    def _connect(self) -> None:
        if time.monotonic() < self._tried_at + RETRY_SECONDS:
            return
        self._tried_at = time.monotonic()
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        try:
            made.connect(self._path)
        except OSError:
            made.close()
            return
        made.settimeout(self._seconds)
        self._socket, self._received = made, Received()
        self._greeted = self._serves_none = False
        self._send(Attach(self._rows))

    def _send(self, message: messages.Message) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(messages.encode(message))
            except OSError:
                self._lose(ENDED)

    def _receive(self, seconds: float) -> bool:
        """Waits so long for something, and takes what is there. -> whether there was any"""
        if self._socket is None or not select.select([self._socket], [], [], seconds)[0]:
            return False
        try:
            data = self._socket.recv(1 << 16)
            self._received.add(data)
            while (body := self._received.take()) is not None:
                self._take(messages.decode(body))
        except (OSError, InvalidFrame):
            data = b""
        if not data:
            self._lose(ENDED)
        return bool(data)

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, Filled):
            self._filled = message
        elif isinstance(message, Attached) and not message.words:
            self._serves_none = True
        elif isinstance(message, Attached):
            mapped = mmap.mmap(self._file, 0)
            self.table = np.frombuffer(mapped, np.int32).reshape(self._rows, message.words)
            self._ready = True

    def _lose(self, reason: str) -> None:
        """The connection, and every sequence that has begun."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket, self._ready = None, False
        for id, failed in self._begun.items():
            self._begun[id] = failed or reason
