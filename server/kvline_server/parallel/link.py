"""A socket between rank 0 and another rank. A process that waits at one learns at once that the
other side has ended, and in bounded time that it does not answer."""

from __future__ import annotations

import socket
import time

from kvline_server.errors import InvalidFrame, RankLost
from kvline_server.ipc import messages
from kvline_server.ipc.frames import Received
from kvline_server.ipc.messages import Message

_READ = 64 << 10


class Link:
    """Used by one thread alone."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        """`rank`: of the other side."""
        self.rank = rank
        self._connection = connection
        self._received = Received()

    def send(self, message: Message, seconds: float) -> None:
        """Raises RankLost, also where the other side has read nothing for so long."""
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(messages.encode(message))
        except TimeoutError:
            raise self.silent(seconds) from None
        except OSError:
            raise self.ended() from None

    def receive(self, seconds: float) -> Message | None:
        """None where nothing comes for so long. Raises RankLost at the end of the stream, and
        InvalidFrame."""
        end = time.monotonic() + seconds
        while (message := self._next()) is None:
            self._connection.settimeout(max(1e-3, end - time.monotonic()))
            try:
                data = self._connection.recv(_READ)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            if not data:
                raise self.ended()
            self._received.add(data)
        return message

    def check(self) -> None:
        """Raises RankLost if the other side has ended."""
        self._connection.settimeout(0)
        try:
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise self.ended()
        except BlockingIOError:
            return
        except OSError:
            raise self.ended() from None

    def ended(self) -> RankLost:
        return RankLost(f"rank {self.rank} has ended")

    def silent(self, seconds: float) -> RankLost:
        return RankLost(f"rank {self.rank} has not answered for {seconds:g} s")

    def _next(self) -> Message | None:
        """The first message that has come whole."""
        try:
            body = self._received.take()
            return None if body is None else messages.decode(body)
        except InvalidFrame as error:
            raise self.invalid(str(error)) from None

    def unexpected(self, message: Message) -> InvalidFrame:
        return self.invalid(f"{type(message).__name__}, which nobody asked for")

    def invalid(self, what: str) -> InvalidFrame:
        return InvalidFrame(f"rank {self.rank} sent {what}")
