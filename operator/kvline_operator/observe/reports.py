"""A pod's sizing report and load over HTTP. Untrusted: bounded in bytes and in time.

The report of a Ready pod does not change until it restarts, so it is cached by pod UID and read
again in the first reconcile after `keep_seconds`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvline_contract.codec import ContractError
from kvline_contract.load import Load
from kvline_contract.names import END_PRE_STOP_PATH, OPEN_GATE_PATH, SIZING_PATH
from kvline_contract.report import REPORT_VERSION, SizingReport, State
from kvline_operator.observe.ask import Asker, Request, Silent, Unreachable

T = TypeVar("T")
LOAD_PATH = "/load"
# A server that knows version 1 alone ignores which one is asked for.
REPORT_PATH = f"{SIZING_PATH}?version={REPORT_VERSION}"
# A pod that is slow to answer, as on a busy node, keeps its last report for so long.
SLOW_SECONDS = 5.0
MAX_ENTRIES = 4096  # reports; the least recently stored one is evicted and read again


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one attempt to read a report: the report, or an error."""

    report: SizingReport | None
    error: str = ""  # empty with a report
    invalid: bool = False  # it answered, but not with a valid report


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
        self._recent: _Cache[SizingReport] = _Cache(clock)
        self._asker = Asker(clock)

    def begin(self, uid: str, address: str, ready: bool, load: bool) -> None:
        """Asks for what is read next of this pod, with its load or without."""
        if not (ready and self._reports.get(uid, self._keep_seconds)):
            self._asker.begin(uid, Request(address, self._port, REPORT_PATH))
        if load and not self._loads.get(uid, self._load_seconds):
            self._asker.begin(uid, self._load_request(address))

    def read(self, uid: str, address: str, ready: bool) -> Reading:
        if ready and (kept := self._reports.get(uid, self._keep_seconds)):
            return Reading(kept.value)
        reading = self._report(uid, address)
        if reading.report is not None and reading.report.state is State.VALIDATED:
            self._reports.put(uid, reading.report)
        elif reading.report is None and ready and (kept := self._reports.get(uid)):
            # An unreadable report does not remove figures already read from the same pod.
            return Reading(kept.value, reading.error, reading.invalid)
        return reading

    def load(self, uid: str, address: str) -> Load | None:
        """A replica's load, asked for every `load_seconds`; the last one is used for twice as long
        where a pod is slow to answer."""
        if kept := self._loads.get(uid, self._load_seconds):
            return kept.value
        try:
            load = Load.parse(self._asker.ask(uid, self._load_request(address)))
        except Silent:
            recent = self._loads.get(uid, 2 * self._load_seconds)
            return recent.value if recent is not None else None
        except (Unreachable, ContractError):
            load = None
        self._loads.put(uid, load)
        return load

    def _load_request(self, address: str) -> Request:
        """Its answer may be read one interval late."""
        return Request(address, self._port, LOAD_PATH, keep=2 * self._load_seconds)

    def _report(self, uid: str, address: str) -> Reading:
        try:
            raw = self._asker.ask(uid, Request(address, self._port, REPORT_PATH))
            report = SizingReport.parse(raw)
        except Silent as error:
            recent = self._recent.get(uid, SLOW_SECONDS)
            return Reading(recent.value) if recent is not None else Reading(None, str(error))
        except Unreachable as error:
            return Reading(None, str(error))
        except ContractError as error:
            return Reading(None, str(error), invalid=True)
        if report.pod_uid != uid:
            return Reading(None, "podUID: the report is of another pod", invalid=True)
        self._recent.put(uid, report)
        return Reading(report)

    def end_wait(self, address: str, token: str) -> None:
        """Ends a terminating pod's wait for its clients. Servers of earlier images wait on, and
        those whose gate file does not have the token's digest."""
        self._notify(address, END_PRE_STOP_PATH, token)

    def open_gate(self, uid: str, address: str, token: str) -> None:
        """Notifies a pod that its gate file is open. Servers of earlier images wait for it, and
        those whose gate file does not have the token's digest."""
        self._notify(address, f"{OPEN_GATE_PATH}?uid={uid}", token)

    def _notify(self, address: str, path: str, token: str) -> None:
        headers = f"Authorization: Bearer {token}\r\n" if token else ""
        with suppress(Unreachable, ContractError):
            self._asker.ask(address, Request(address, self._port, path, "POST", headers))
