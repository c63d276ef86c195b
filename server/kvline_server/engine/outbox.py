"""The engine's line to the HTTP process. Sending never waits: a step must not stand still because
somebody who reads answers does. What the kernel does not take at once a thread sends later."""

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
        self._held = 0
        self._given_up = False
        self._changed = threading.Condition(self._lock)
        threading.Thread(target=self._work_off, daemon=True, name="outbox").start()

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone, or so far behind that it is given up."""
        data = encode(message)
        with self._changed:
            if not self._backlog:
                data = data[self._send_now(data) :]
            if not data:
                return
            if self._given_up or self._held + len(data) > self._limit:
                self._given_up = True
                self.connection.shutdown(socket.SHUT_RDWR)
                raise OSError("the HTTP process does not read")
            self._backlog.append(data)
            self._held += len(data)
            self._changed.notify()

    def _send_now(self, data: bytes) -> int:
        try:
            return self.connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _work_off(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._backlog or self._given_up)
                    if self._given_up:
                        return
                    data = self._backlog[0]
                self.connection.sendall(data)
                with self._changed:
                    self._backlog.popleft()
                    self._held -= len(data)
