"""The engine's connection to the HTTP process. `send` never blocks, so a slow reader cannot delay
an engine step: what the socket buffer does not take at once, a thread sends later.

Admission bounds how much can be waiting, so what counts is only whether the other side still reads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kvline_server.ipc.messages import Channel, Message, encode

PATIENCE = 60.0  # seconds in which the other side reads nothing; its liveness allows as many
CHUNK = 64 << 10  # bytes after which progress is noted


class Outbox(Channel):
    def __init__(
        self, connection: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(connection)
        self._clock = clock
        self._backlog: deque[bytes] = deque()
        self._progress_at = 0.0  # while there is a backlog
        self._given_up = False
        self._changed = threading.Condition(self._lock)
        threading.Thread(target=self._send_backlog, daemon=True, name="outbox").start()

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone, or has read nothing for PATIENCE."""
        data = encode(message)
        with self._changed:
            if not self._backlog:
                data = data[self._send_now(data) :]
                self._progress_at = self._clock()
            if not data:
                return
            if self._given_up or self._clock() - self._progress_at > PATIENCE:
                self._given_up = True
                self.connection.shutdown(socket.SHUT_RDWR)
                raise OSError("the HTTP process does not read")
            self._backlog.append(data)
            self._changed.notify()

    def _send_now(self, data: bytes) -> int:
        try:
            return self.connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_backlog(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._backlog or self._given_up)
                    if self._given_up:
                        return
                    data = memoryview(self._backlog[0])
                for start in range(0, len(data), CHUNK):
                    self.connection.sendall(data[start : start + CHUNK])
                    self._progress_at = self._clock()
                with self._changed:
                    self._backlog.popleft()
        self._given_up = True
