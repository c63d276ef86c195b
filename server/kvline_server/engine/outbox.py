"""The engine's connection to the HTTP process. `send` never blocks, so a slow reader cannot delay
an engine step: what the socket buffer does not take at once, a thread sends later."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

from kvline_server.engine.messages import Channel, Message, encode

MAX_BACKLOG_BYTES = 32 << 20


class Outbox(Channel):
    def __init__(self, connection: socket.socket, limit: int = MAX_BACKLOG_BYTES) -> None:
        super().__init__(connection)
        self._limit = limit
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._overflowed = False
        self._changed = threading.Condition(self._lock)
        threading.Thread(target=self._send_backlog, daemon=True, name="outbox").start()

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone, or more than `limit` bytes behind."""
        data = encode(message)
        with self._changed:
            if not self._backlog:
                data = data[self._send_now(data) :]
            if not data:
                return
            if self._overflowed or self._backlog_bytes + len(data) > self._limit:
                self._overflowed = True
                self.connection.shutdown(socket.SHUT_RDWR)
                raise OSError("the HTTP process does not read")
            self._backlog.append(data)
            self._backlog_bytes += len(data)
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
                    self._changed.wait_for(lambda: self._backlog or self._overflowed)
                    if self._overflowed:
                        return
                    data = self._backlog[0]
                self.connection.sendall(data)
                with self._changed:
                    self._backlog.popleft()
                    self._backlog_bytes -= len(data)
