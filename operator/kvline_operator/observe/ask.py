"""HTTP requests to pods' internal ports, bounded in bytes and in time.

All share one thread with an event loop, so ports that accept and never answer occupy no threads.
Who asks waits a second at most; a pod that was silent is asked again behind the scenes, less and
less often, and nobody waits for it until it has answered.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache

from kvline_contract.codec import ContractError
from kvline_contract.listening import shown
from kvline_contract.report import MAX_REPORT_BYTES

SECONDS = 5.0  # of a request, from the connection to the end of the answer
# That who asks waits for it: always a moment, and a second while few others do.
MOMENT, PATIENCE, PATIENT = 0.1, 1.0, 3
LONGEST_PAUSE = 15.0  # between requests to a pod that is silent
MAX_SILENT = 4096  # pods; the least recently asked one is forgotten


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

    def begin(self, seconds: float) -> Future[bytes]:
        """Its result is the answer's body, or one of the errors above, or a ContractError for an
        answer other than HTTP 200."""
        return asyncio.run_coroutine_threadsafe(_answer(self, seconds), _loop())

    def silent(self, seconds: float) -> Silent:
        return Silent(f"no answer within {seconds:g} s at {shown(self.address, self.port)}")


@dataclass(slots=True)
class _Silence:
    """Of one pod and path: the request under way, and what came of those before."""

    request: Future[bytes] | None = None
    began: float = 0.0
    failures: int = 0
    again: float = 0.0  # not asked before


class Asker:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS
    ) -> None:
        self._clock = clock
        self._seconds = seconds  # of a request
        self._silences: OrderedDict[tuple[str, str], _Silence] = OrderedDict()
        self._patient = threading.Semaphore(PATIENT)

    def ask(self, pod: str, request: Request) -> bytes:
        """Raises as above; Silent also while a silent pod is not asked, or has yet to answer. One
        caller at a time for a pod and path."""
        key = pod, request.path
        known = self._silences.pop(key, None) or _Silence()
        if known.request is not None and self._clock() - known.began > SECONDS + LONGEST_PAUSE:
            known.request = None  # its answer is too old
        if known.request is None and self._clock() < known.again:
            self._keep(key, known)
            raise request.silent(PATIENCE)
        if known.request is None:
            known.request, known.began = request.begin(self._seconds), self._clock()
        answer = known.request
        if not self._has_come(answer, known.failures):
            known.failures = known.failures or 1
            self._keep(key, known)
            raise request.silent(PATIENCE)
        try:
            return answer.result()
        except Silent:
            known.request, known.failures = None, known.failures + 1
            known.again = self._clock() + min(2.0**known.failures, LONGEST_PAUSE)
            self._keep(key, known)
            raise

    def _has_come(self, answer: Future[bytes], failures: int) -> bool:
        if failures or wait([answer], MOMENT).done:
            return answer.done()
        if self._patient.acquire(blocking=False):
            try:
                wait([answer], PATIENCE - MOMENT)
            finally:
                self._patient.release()
        return answer.done()

    def _keep(self, key: tuple[str, str], known: _Silence) -> None:
        self._silences[key] = known
        if len(self._silences) > MAX_SILENT:
            self._silences.popitem(last=False)


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


async def _answer(request: Request, seconds: float) -> bytes:
    """HTTP/1.0: client libraries limit the time of each read, not of the whole."""
    try:
        async with asyncio.timeout(seconds):
            raw = await _exchange(request)
    except TimeoutError:
        raise request.silent(seconds) from None
    except OSError as error:
        where = shown(request.address, request.port)
        raise Unreachable(f"{type(error).__name__} at {where}") from None
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator or b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
        raise ContractError("the answer is not HTTP 200")
    return body


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
