"""Limits per connection of the public port, on top of uvicorn.

uvicorn limits neither the size of a request's head, nor its time, nor the number of connections.
Here each connection has at most one deadline, that of its phase; one sweep per second closes those
that are past it, so that requests need no timers. Before a connection with an unfinished request is
closed, the rest is read and discarded for a moment: otherwise the kernel sends a reset, and the
client never sees the error (decisions/019).
"""

from __future__ import annotations

import asyncio
import json
import weakref
from typing import Any

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from kvline_server.http.errors import ApiError, BadRequest, HeadTooLarge, TimedOut
from kvline_server.options.clients import ClientLimits

NEVER = float("inf")
CROWDED = 7 / 8  # of the connections allowed: from here on each answer is its connection's last
SLOWEST = 1 << 10  # bytes a second that a client must read of its answer
HEAD = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
HEAD_TOO_LARGE = "the head of the request is too large"


class Connections:
    """All open connections; `waiting` has the idle ones, longest first."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        self.draining = False

    def make(self, **options: Any) -> Connection:
        """uvicorn calls it for each connection."""
        return Connection(self, **options)

    def room(self) -> bool:
        """Whether one more may open; if not, closes the connection that has been idle longest."""
        if len(self.open) < self.limits.connections:
            return True
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        oldest.drop()
        return True

    def crowded(self) -> bool:
        """Whether idle connections may soon have to close for new ones."""
        return len(self.open) >= CROWDED * self.limits.connections

    def wait(self, connection: Connection) -> None:
        self.waiting.pop(connection, None)
        self.waiting[connection] = None

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.waiting.pop(connection, None)

    def drain(self) -> None:
        """From now on each connection closes after an answer that says so."""
        self.draining = True
        for connection in self.open:
            connection.last_answer()

    def owing(self) -> bool:
        return any(connection.owes for connection in self.open)

    def unanswered(self) -> int:
        """Connections whose client does not have its whole answer yet."""
        return sum(not connection.answered() for connection in self.open)

    def drop(self) -> None:
        for connection in list(self.open):
            connection.drop()

    async def sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.sweep)
            now = loop.time()
            for connection in [c for c in self.open if min(c.deadline, c.stalled_until) < now]:
                connection.expire(now)


class Connection(HttpToolsProtocol):
    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.all = connections
        self.limits = connections.limits
        self.deadline = NEVER  # of what the client sends next
        self.stalled_until = NEVER  # of what it does not read
        self._unsent = 0  # bytes of the answer, when its deadline was last set
        self._in_head = False
        self._in_request = False  # head or body
        self._head = self._raw = 0  # bytes of a head: parsed, and received
        self._parsed = self._before = 0  # bytes of what was just received; those of other requests
        self._extra = 0  # bytes of a body that is thrown away
        self.lingering = False
        self._why: ApiError | None = None
        # The drain began within its last answer, whose head kept the connection alive. One
        # more request is waited for: a client that has sent it would take a close for a failure.
        self.owes = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Gentle(transport, self))  # type: ignore[arg-type]
        if not self.all.room():
            transport.abort()
        self.all.open.add(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lingering = True
        self.all.forget(self)
        super().connection_lost(exc)
        # A timer, and requests that were not begun, know their connection.
        self._unset_keepalive_if_required()
        self.pipeline.clear()

    def drop(self) -> None:
        """Closes at once; its request is aborted."""
        self.all.forget(self)
        self.transport.abort()

    def answered(self) -> bool:
        """Whether each request so far has its whole answer, and the kernel has all of it."""
        complete = self.cycle is None or self.cycle.response_complete
        sent = self.transport is None or not self.transport.get_write_buffer_size()
        return complete and not self.pipeline and sent

    def last_answer(self) -> None:
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """uvicorn: the server ends."""
        if self.cycle is None or (self.cycle.response_complete and not self.owes):
            self.transport.close()
        else:
            self.last_answer()

    def expire(self, now: float) -> None:
        """Past its deadline: a late head gets a 408; idle or unread connections are just closed."""
        if self.stalled_until < now and self._reads():
            return
        if self._in_head and self.stalled_until > now and not self.lingering:
            self._refuse(TimedOut("the head of the request did not come in time"))
        else:
            self.drop()

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._discard(data)
            return
        self._parsed = self._before = 0
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # Bytes that the parser buffers until a header is complete.
            self._raw += len(data) - self._before
            if self._raw > self.limits.head_bytes:
                self._refuse(HeadTooLarge(HEAD_TOO_LARGE))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._head = self._raw = self._extra = 0
        self._before = self._parsed
        self._until(self.limits.head)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > self.limits.headers:
            self._stop(HeadTooLarge("the request has too many headers"))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self.limits.pipeline:
            self._stop(BadRequest("too many requests at once on one connection"))
        self._in_head = False
        self.deadline = NEVER  # body.py limits the time of a body
        self.all.waiting.pop(self, None)
        super().on_headers_complete()
        self.owes = False
        if self.all.draining or self.all.crowded():
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # RFC 9110, 10.1.1
            app = _until_close(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._parsed += len(body)
        if self.cycle.response_complete:
            self._discard(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        super().on_message_complete()
        if self.cycle.response_complete:
            self._wait()

    def _count(self, size: int) -> None:
        self._head += size
        self._parsed += size
        if self._head > self.limits.head_bytes:
            self._stop(HeadTooLarge(HEAD_TOO_LARGE))

    def _stop(self, why: ApiError) -> None:
        """Stops the parser; `send_400_response` sends the error."""
        self._why = why
        raise why

    def _discard(self, data: bytes) -> None:
        self._extra += len(data)
        if self._extra > self.limits.linger_bytes:
            self.drop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._in_request:  # rejected before its end, which may still arrive
            self._until(self.limits.linger)
        else:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self.stalled_until = self.loop.time() + self.limits.stall

    def _reads(self) -> bool:
        """Whether the client has read enough since the last time; it then gets as long again."""
        read = self._unsent - self.transport.get_write_buffer_size()
        if read < SLOWEST * self.limits.stall:
            return False
        self.pause_writing()
        return True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled_until = NEVER

    def send_400_response(self, msg: str) -> None:
        """The parser stopped at one of our limits, or at invalid HTTP."""
        self._refuse(self._why or BadRequest("the request is not valid HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """Sends an error without the application; never within another answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.drop()
            return
        body = json.dumps(error.body()).encode()
        self._in_request, self._in_head = True, False
        self.transport.write(STATUS_LINE[error.status] + HEAD % len(body) + body)
        self.transport.close()

    def _until(self, seconds: float) -> None:
        self.deadline = self.loop.time() + seconds
        self.all.wait(self)

    def _wait(self) -> None:
        self.owes = self.all.draining and self.cycle is not None
        self._until(self.limits.late if self.owes else self.limits.idle)

    def linger(self, transport: asyncio.Transport) -> None:
        """Closes after discarding what the client still sends, so that it can read the answer."""
        if self.lingering:
            return
        self.lingering = True
        if not self._in_request or transport.is_closing() or not transport.can_write_eof():
            transport.close()
            return
        self._extra = 0
        self._until(self.limits.linger)
        self.flow.resume_reading()
        transport.write_eof()


def _until_close(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Its answers without a chunked encoding, which HTTP/1.0 does not have: one without a length
    ends with its connection (RFC 9112, 6.3). uvicorn makes chunks of each that has no length."""

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        measured = False

        async def plain(message: ASGISendEvent) -> None:
            nonlocal measured
            if message["type"] == "http.response.start":
                measured = any(name == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if measured else False
            elif message["type"] == "http.response.body" and not measured:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return answer


class _Gentle:
    """A transport whose `close` is its connection's `linger`. It does not keep the connection: one
    that is lost goes at once, and not when the collector next looks for cycles."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = weakref.ref(connection)
        self.write = transport.write  # for each token of each stream

    def close(self) -> None:
        connection = self._connection()
        if connection is None:
            self._transport.close()
        else:
            connection.linger(self._transport)

    def is_closing(self) -> bool:
        connection = self._connection()
        return connection is None or connection.lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
