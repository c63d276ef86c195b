"""A pod's sizing report and load over HTTP. Untrusted: bounded in bytes and in time.

The report of a Ready pod does not change until it restarts, so it is cached by pod UID and read
again in the first reconcile after `keep_seconds`.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvline_contract.codec import ContractError
from kvline_contract.listening import shown
from kvline_contract.names import END_PRE_STOP_PATH, OPEN_GATE_PATH, SIZING_PATH
from kvline_contract.report import MAX_REPORT_BYTES, REPORT_VERSION, Load, SizingReport, State

T = TypeVar("T")
SECONDS = 5.0
MAX_ENTRIES = 4096  # reports; the least recently stored one is evicted and read again


class Unreachable(Exception):
    """The pod's internal port did not answer in time, or closed the connection."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one attempt to read a report: the report, or an error."""

    report: SizingReport | None
    error: str = ""  # empty with a report
    invalid: bool = False  # it answered, but not with a valid report


def fetch(address: str, port: int, uid: str, seconds: float = SECONDS) -> Reading:
    """One GET of /sizing; never longer than `seconds`, never more than the contract's bytes. A
    server that knows version 1 alone ignores which one is asked for."""
    path = f"{SIZING_PATH}?version={REPORT_VERSION}"
    try:
        raw = _get(address, port, path, time.monotonic() + seconds)
        report = SizingReport.parse(raw)
    except Unreachable as error:
        return Reading(None, str(error))
    except ContractError as error:
        return Reading(None, str(error), invalid=True)
    if report.pod_uid != uid:
        return Reading(None, "podUID: the report is of another pod", invalid=True)
    return Reading(report)


def fetch_load(address: str, port: int, seconds: float = SECONDS) -> Load | None:
    """One GET of /load; None where it fails or is invalid."""
    try:
        return Load.parse(_get(address, port, "/load", time.monotonic() + seconds))
    except (Unreachable, ContractError):
        return None


def _get(address: str, port: int, path: str, deadline: float) -> bytes:
    return _ask("GET", address, port, path, deadline)


def _ask(
    method: str, address: str, port: int, path: str, deadline: float, headers: str = ""
) -> bytes:
    """A plain HTTP/1.0 request: client libraries limit the time of each read, not of the whole."""
    try:
        with socket.create_connection((address, port), _left(deadline)) as connection:
            connection.settimeout(_left(deadline))
            asked = f"{method} {path} HTTP/1.0\r\nHost: pod\r\n{headers}\r\n"
            connection.sendall(asked.encode())
            raw = b""
            while True:
                connection.settimeout(_left(deadline))
                chunk = connection.recv(65536)
                if not chunk:
                    break
                raw += chunk
                if len(raw) > MAX_REPORT_BYTES + 4096:
                    raise ContractError(f"the answer is longer than {MAX_REPORT_BYTES} bytes")
    except OSError as error:
        raise Unreachable(f"{type(error).__name__} at {shown(address, port)}") from None
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator or b" 200 " not in head.split(b"\r\n", 1)[0] + b" ":
        raise ContractError("the answer is not HTTP 200")
    return body


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("too slow")
    return left


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    at: float


class _Cache(Generic[T]):
    """The last value read from each pod, by its UID."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _Entry[T]] = OrderedDict()

    def put(self, uid: str, value: T) -> None:
        self._kept[uid] = _Entry(value, self._clock())
        self._kept.move_to_end(uid)
        if len(self._kept) > MAX_ENTRIES:
            self._kept.popitem(last=False)

    def get(self, uid: str, seconds: float = float("inf")) -> _Entry[T] | None:
        """None where it is older than `seconds` or absent."""
        kept = self._kept.get(uid)
        return kept if kept is not None and self._clock() - kept.at < seconds else None


class Reports:
    """Reads reports and loads of pods, and caches them."""

    def __init__(
        self,
        port: int,
        keep_seconds: float,
        load_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._keep_seconds = keep_seconds
        self._load_seconds = load_seconds
        self._loads: _Cache[Load | None] = _Cache(clock)
        self._reports: _Cache[SizingReport] = _Cache(clock)

    def read(self, uid: str, address: str, ready: bool) -> Reading:
        if ready and (kept := self._reports.get(uid, self._keep_seconds)):
            return Reading(kept.value)
        reading = fetch(address, self._port, uid)
        if reading.report is not None and reading.report.state is State.VALIDATED:
            self._reports.put(uid, reading.report)
        elif reading.report is None and ready and (kept := self._reports.get(uid)):
            # An unreadable report does not remove figures already read from the same pod.
            return Reading(kept.value, reading.error, reading.invalid)
        return reading

    def load(self, uid: str, address: str) -> Load | None:
        """A replica's load, at most `load_seconds` old."""
        if kept := self._loads.get(uid, self._load_seconds):
            return kept.value
        load = fetch_load(address, self._port)
        self._loads.put(uid, load)
        return load

    def end_wait(self, address: str, token: str) -> None:
        """Ends a terminating pod's wait for its clients. Servers of earlier images wait on, and
        those whose gate file does not have the token's digest."""
        self._notify(address, END_PRE_STOP_PATH, token)

    def open_gate(self, uid: str, address: str, token: str) -> None:
        """Notifies a pod that its gate file is open. Servers of earlier images wait for it, and
        those whose gate file does not have the token's digest."""
        self._notify(address, f"{OPEN_GATE_PATH}?uid={uid}", token)

    def _notify(self, address: str, path: str, token: str) -> None:
        with suppress(Unreachable, ContractError):
            deadline = time.monotonic() + SECONDS
            headers = f"Authorization: Bearer {token}\r\n" if token else ""
            _ask("POST", address, self._port, path, deadline, headers)
