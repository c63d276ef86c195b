"""Answers of the internal port, computed from the last heartbeats of the child processes.

Threads that read the children write here, threads that answer probes read. Attributes are replaced
as a whole, so no lock is needed beyond the report keeper's own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from functools import partial

from kvline_contract.codec import ContractError
from kvline_contract.launch import GateFile
from kvline_contract.load import Load
from kvline_contract.report import VERSION, State
from kvline_server.ipc.histogram import total
from kvline_server.ipc.messages import COUNTS, Beat, EdgeBeat
from kvline_server.ipc.starvation import Quiet
from kvline_server.options.options import Options
from kvline_server.parent import metrics
from kvline_server.parent.recent import Recent
from kvline_server.parent.report_keeper import ReportKeeper

WATCHED_SECONDS = 60.0  # the parent's loop takes a tenth of a second, and ends of others some more


def together(edges: list[EdgeBeat]) -> EdgeBeat:
    """The HTTP processes as one."""
    return EdgeBeat(
        ready=all(edge.ready for edge in edges),
        connected=all(edge.connected for edge in edges),
        latencies=total(edge.latencies for edge in edges),
        **{name: sum(getattr(edge, name) for edge in edges) for name in COUNTS},
    )


class Health:
    def __init__(self, options: Options, keeper: ReportKeeper, served: str, processes: int) -> None:
        """`processes`: that serve HTTP."""
        self.options = options
        self.served = served  # the model's name in requests
        self.keeper = keeper
        self.draining = False
        self.engine_gone = False
        self.engine_starts = 0
        self._edges = [EdgeBeat(ready=False, active=0)] * processes
        self.edge = together(self._edges)
        self._edge_lock = threading.Lock()  # each process's beats come on a thread of their own
        self._beat = Beat(busy=False, steps=0)
        self._engine_alive_at = self._watched_at = time.monotonic()
        self._http_alive_at = [self._engine_alive_at] * processes
        self._engine = Quiet(lambda: self._engine_alive_at)
        ages = (partial(self._http_alive_at.__getitem__, i) for i in range(processes))
        self._http = [Quiet(since) for since in ages]
        self._recent = Recent()
        self._was_ready = False
        self._need_not_wait = threading.Event()
        self._gate: GateFile | None = None
        self._notified_open = False
        self._gate_read_at = float("-inf")

    def on_http_heartbeat(self, process: int, beat: EdgeBeat) -> None:
        now = time.monotonic()
        with self._edge_lock:
            self._edges[process] = beat
            edge = together(self._edges)
            self._recent.add(now, edge, self._beat.running, self._beat.waiting)
            self.edge = edge
            self._http_alive_at[process] = now

    def watch(self, engine: Iterable[int], http: list[int]) -> None:
        """From the parent's loop, with the process ids of the ranks and of each HTTP process."""
        self._watched_at = time.monotonic()
        self._engine.watch(engine)
        for quiet, pid in zip(self._http, http, strict=True):
            quiet.watch([pid])

    def on_http_drained(self, process: int) -> None:
        """It has ended and sends no more heartbeats; what it counted stays."""
        self._http_alive_at[process] = float("inf")

    def owes_answers(self, ended: list[int]) -> bool:
        """Whether a client may still wait for the error of a request that an ended engine has left:
        until each HTTP process has `ended`, or has seen that end and says that it answered all."""
        return any(
            edge.connected or edge.active or edge.unanswered
            for process, edge in enumerate(self._edges)
            if process not in ended
        )

    def on_engine_heartbeat(self, beat: Beat | None = None) -> None:
        """A busy engine counts as alive only if it has run a step since its last heartbeat."""
        if beat is None or not beat.busy or beat.steps != self._beat.steps:
            self._engine_alive_at = time.monotonic()
        self._beat = beat or self._beat

    def read_gate(self) -> None:
        """Re-reads the gate file every second; the last valid one stays in force."""
        now = time.monotonic()
        if self.options.gate is None or now - self._gate_read_at < self.options.timeouts.gate:
            return
        self._gate_read_at = now
        with contextlib.suppress(OSError, ContractError):
            self._gate = GateFile.parse(self.options.gate.read_bytes())
            if self._gate.open:  # the file has arrived
                self._notified_open = False

    def not_started(self) -> str | None:
        """The state while the budget is not validated; the gate does not matter here."""
        state = self.keeper.report.state
        return None if state is State.VALIDATED else str(state)

    def not_ready(self) -> str | None:
        """Does not depend on load: a full queue answers 429. Else overload would take every replica
        out of the endpoints."""
        reason = self._why_not_ready()
        self._was_ready = self._was_ready or reason is None
        return reason

    def _why_not_ready(self) -> str | None:
        result = self.keeper.report.result
        if result is None:
            return str(self.keeper.report.state)
        if self.draining:
            return "Draining"
        if self.engine_gone:
            return "EngineExited"
        if not self.edge.connected:
            return "HttpNotConnected"
        # Leave the endpoints well before the end, so that no new requests wait.
        stalled = self._stalled(self.options.timeouts.step)
        if stalled is not None:
            return stalled[0]
        if self.options.gate is None:
            return None
        if self._gate is None or not (self._gate.open or self._notified_open):
            return "GateClosed"
        # A raised threshold must not take a serving pod out of the endpoints.
        if not self._was_ready and not self._gate.admits(result, self._gpu()):
            return "BelowMinimum"
        return None

    def _gpu(self) -> str:
        """The device's name in the report, which the gate file uses too."""
        provenance = self.keeper.report.provenance
        return provenance.gpu if provenance is not None else ""

    def not_alive(self) -> str | None:
        """Only the parent's own loop, which ends the pod itself, with a reason, where a process
        makes no progress; the kubelet's way to end it leaves none."""
        return "ParentStalled" if time.monotonic() - self._watched_at > WATCHED_SECONDS else None

    def no_progress(self) -> str | None:
        """Why the pod must end: a process that makes no progress, though it has been given CPU."""
        stalled = self._stalled(self.options.timeouts.liveness)
        if stalled is None:
            return None
        name, quiet = stalled
        what = "the engine ran no step while work waited"
        if name == "HttpStalled":
            what = "an HTTP process answered nothing"
        counted, passed = quiet.seconds(), quiet.by_the_clock()
        lacked = f"of which it lacked a CPU for {passed - counted:.0f} s"
        return f"{what}: for {passed:.0f} s, {lacked}"

    def wait_to_leave(self) -> None:
        """Until the last client knows that the pod ends; not at all where it was never ready: a
        rejected candidate has no client, and another pod may be waiting for its GPU."""
        if self._was_ready:
            self._need_not_wait.wait(self.options.timeouts.leave)

    def end_wait(self, token: str) -> str | None:
        """The operator's notice that a pod waits for this one's GPU, and that no other serves: the
        sooner this one ends, the sooner there are answers again. Returns the reason where it is
        another's notice."""
        if not self._knows(token):
            return "UnknownToken"
        self._need_not_wait.set()
        return None

    def open_gate(self, uid: str, token: str) -> str | None:
        """The operator's notice to the pod `uid` that it has opened the gate file, which may take
        the kubelet a minute to bring. The thresholds of the file that is here still apply. Returns
        the reason where the notice is for another pod, which had this address before, or of
        another than the operator that wrote the file."""
        if uid != self.keeper.report.pod_uid:
            return "OtherPod"
        if not self._knows(token):
            return "UnknownToken"
        self._notified_open = True
        return None

    def _knows(self, token: str) -> bool:
        return self._gate is not None and self._gate.knows(token)

    def _stalled(self, limit: float) -> tuple[str, Quiet] | None:
        """Where a process's last heartbeat is older than this, but for what it was starved of CPU;
        no request is involved."""
        http = max(self._http, key=Quiet.seconds)
        if http.seconds() > limit:
            return "HttpStalled", http
        if self.keeper.report.state is State.VALIDATED and self._engine.seconds() > limit:
            return "EngineStalled", self._engine
        return None

    def load(self) -> Load | None:
        report, beat = self.keeper.report, self._beat
        result, effective = report.result, report.effective
        if result is None or effective is None:
            return None
        now, recent = time.monotonic(), self._recent
        return Load(
            version=VERSION,
            kv_tokens=result.kv_tokens,  # the first heartbeat after Validated may be missing yet
            used_tokens=beat.used_tokens,
            evictable_tokens=beat.evictable_tokens,
            waiting_prompt_tokens=beat.waiting_prompt_tokens,
            running=beat.running,
            waiting=beat.waiting,
            refused_last60s=recent.rejected(now),
            max_running_requests=effective.max_running_requests,
            draining=self.draining,
            retrying=recent.retrying(now),
            arriving_milli=recent.arriving_milli(now),
            time_to_first_token_us=recent.first_token(now),
            inter_token_latency_us=recent.between_tokens(now),
        )

    def metrics(self) -> bytes:
        return metrics.render(
            self.keeper.report, self._beat, self.edge, self.engine_starts, self.served
        )
