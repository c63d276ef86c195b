"""HTTP requests to pods' internal ports, bounded in bytes and in time.

All share one thread with an event loop, so ports that accept and never answer occupy no threads.
Who asks waits a second at most, for all pods that were begun together. Nobody waits again for a pod
that was late: it is asked behind the scenes until it answers in time, less and less often while it
does not answer at all.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache

from kvline_contract.codec import ContractError
from kvline_contract.listening import shown
from kvline_contract.report import MAX_REPORT_BYTES

SECONDS = 5.0  # of a request, from the connection to the end of the answer
PATIENCE = 1.0  # of who asks
# Once as many waits as there are workers were in vain within a minute, as when a node is lost, who
# asks waits a moment only: other services do not wait for silent pods.
MOMENT, IN_VAIN, MINUTE = 0.1, 8, 60.0
LONGEST_PAUSE = 15.0  # between requests to a pod that is silent
MAX_LATE = 4096  # pods; the least recently asked one is forgotten


class Unreachable(Exception):
    """The port refused or closed the connection."""


class Silent(Unreachable):
    """It did not answer in time."""


@dataclass(frozen=True, slots=True)
class Request:
    address: str
    port: int
    path: str
    method: str = "GET"
    headers: str = ""
    keep: float = SECONDS + LONGEST_PAUSE  # since the request; a later answer is too old

    def begin(self, seconds: float) -> Future[Answer]:
        """Its result is the answer, or one of the errors above, or a ContractError for an
        answer other than HTTP 200."""
        return asyncio.run_coroutine_threadsafe(_answer(self, seconds), _loop())

    def silent(self) -> Silent:
        """One text, however long was waited: it is in the status."""
        return Silent(f"no answer in time at {shown(self.address, self.port)}")


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    seconds: float  # that it took


@dataclass(slots=True)
class _Asked:
    """Of one pod and path: the request under way, and what came of those before."""

    request: Future[Answer] | None = None
    began: float = 0.0
    failures: int = 0  # to answer in time
    again: float = 0.0  # not asked before


def pause(failures: int) -> float:
    """Seconds between requests to a pod that is silent."""
    return min(2.0 ** min(failures, 16), LONGEST_PAUSE)


class Asker:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS
    ) -> None:
        self._clock = clock
        self._seconds = seconds  # of a request
        self._late: OrderedDict[tuple[str, str], _Asked] = OrderedDict()
        self._in_vain: deque[float] = deque(maxlen=IN_VAIN)  # when waits ended without an answer

    def begin(self, pod: str, request: Request) -> None:
        """Sends it, so that `ask` waits from now on."""
        known = self._late.pop((pod, request.path), None) or _Asked()
        self._send(known, request)
        self._keep(pod, request, known)

    def ask(self, pod: str, request: Request) -> bytes:
        """Raises as above; Silent also while a silent pod is not asked, or has yet to answer. One
        caller at a time for a pod and path."""
        known = self._late.pop((pod, request.path), None) or _Asked()
        self._send(known, request)
        if known.request is None or not self._has_come(known, known.request):
            known.failures = known.failures or 1
            self._keep(pod, request, known)
            raise request.silent()
        try:
            answer, known.request = known.request.result(), None
        except Silent:
            known.request, known.failures = None, known.failures + 1
            known.again = self._clock() + pause(known.failures)
            self._keep(pod, request, known)
            raise
        if answer.seconds > PATIENCE:
            known.failures = 1
            if request.method == "GET":  # the next answer is there when it is asked for
                self._send(known, request)
            self._keep(pod, request, known)
        return answer.body

    def _send(self, known: _Asked, request: Request) -> None:
        """Unless a request is under way or answered, or the pod is not to be asked."""
        now = self._clock()
        if known.request is not None and now - known.began > request.keep:
            if known.request.done() and known.request.exception() is None:
                known.failures = 0  # it may be quick by now: who asks waits
            known.request = None
        if known.request is None and now >= known.again:
            known.request, known.began = request.begin(self._seconds), now

    def _has_come(self, known: _Asked, answer: Future[Answer]) -> bool:
        if known.failures or answer.done():
            return answer.done()
        now, ends = self._clock(), self._in_vain
        hurried = len(ends) == IN_VAIN and now - ends[0] < MINUTE
        left = known.began + (MOMENT if hurried else PATIENCE) - now
        come = bool(wait([answer], max(0.0, left)).done)
        if not come and left > MOMENT:
            ends.append(self._clock())
        return come

    def _keep(self, pod: str, request: Request, known: _Asked) -> None:
        self._late[pod, request.path] = known
        if len(self._late) > MAX_LATE:
            self._late.popitem(last=False)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="reports")
    thread.start()

    def end() -> None:
        """Before the interpreter goes: a thread that wakes in its end may crash the process."""
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    atexit.register(end)
    return loop


async def _answer(request: Request, seconds: float) -> Answer:
    """HTTP/1.0: client libraries limit the time of each read, not of the whole."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            raw = await _exchange(request)
    except TimeoutError:
        raise request.silent() from None
    except OSError as error:
        where = shown(request.address, request.port)
        raise Unreachable(f"{type(error).__name__} at {where}") from None
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator or b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
        raise ContractError("the answer is not HTTP 200")
    return Answer(body, time.monotonic() - began)


async def _exchange(request: Request) -> bytes:
    reader, writer = await asyncio.open_connection(request.address, request.port)
    try:
        writer.write(
            f"{request.method} {request.path} HTTP/1.0\r\nHost: pod\r\n"
            f"{request.headers}\r\n".encode()
        )
        raw = b""
        while chunk := await reader.read(65536):
            raw += chunk
            if len(raw) > MAX_REPORT_BYTES + 4096:
                raise ContractError(f"the answer is longer than {MAX_REPORT_BYTES} bytes")
        return raw
    finally:
        writer.transport.abort()
