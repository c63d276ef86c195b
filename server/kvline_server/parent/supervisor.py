"""The parent process of a server pod: starts HTTP and engine, keeps the report, answers probes.

It imports neither torch nor a tokenizer, so failures of the others do not affect it. On a CPU an
engine killed for memory before it is Validated is restarted with the next attempt; any other end of
an engine ends the pod with an exit code of the contract.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from kvline_contract.exits import ExitCode
from kvline_contract.launch import Device, LaunchConfig
from kvline_contract.listening import shown
from kvline_contract.names import ATTEMPTS_FILE, ENV_POD_NAME, ENV_POD_UID
from kvline_contract.progress import WAITS_FOR_HTTP
from kvline_contract.report import State, Termination
from kvline_server.errors import ConfigInvalid, PortTaken, ServerError
from kvline_server.ipc.messages import (
    Beat,
    Drain,
    EdgeBeat,
    Message,
    NeighboursReady,
    Progress,
    Serve,
)
from kvline_server.ipc.starvation import Quiet
from kvline_server.memory.device import (
    check_memory,
    container_limit,
    host_limit,
    machine_memory,
    unbounded,
)
from kvline_server.options.clients import LARGE_HOST, ClientLimits
from kvline_server.options.flags import with_flag_names
from kvline_server.options.grammars import grammar_bounds
from kvline_server.options.options import Options
from kvline_server.parent import stalls
from kvline_server.parent.causes import Causes
from kvline_server.parent.children import Child, hear_last_words, listen, share_pixels, start_http
from kvline_server.parent.cpus import cpus, http_processes
from kvline_server.parent.drain import END_SECONDS, MOST_END_SECONDS, DrainState
from kvline_server.parent.engine import EngineProcesses
from kvline_server.parent.grammars import GrammarProcess
from kvline_server.parent.health import Health
from kvline_server.parent.internal import InternalServer
from kvline_server.parent.leave import leave, log
from kvline_server.parent.narrator import Narrator
from kvline_server.parent.report_keeper import ReportKeeper
from kvline_server.sizing.record import AttemptStore, unreadable


class Supervisor:
    def __init__(self, options: Options, launch: LaunchConfig) -> None:
        self.options = options
        self.narrator = Narrator(log)
        self.keeper = ReportKeeper(
            os.environ.get(ENV_POD_UID, ""),
            os.environ.get(ENV_POD_NAME, ""),
            launch.revision,
        )
        self.served, self.device = launch.model.served_name, launch.device
        self.clients = self._clients()
        self.processes = options.http_processes or http_processes(self.clients, cpus())
        self.pixel_fds = share_pixels(launch, self.clients, self.processes)
        self.health = Health(options, self.keeper, self.served, self.processes)
        self.starting = Quiet(lambda: self.keeper.changed_at)
        self.grammars: GrammarProcess | None = None
        self.engine: EngineProcesses | None = None
        self.notified: EngineProcesses | None = None  # that the other processes have their memory
        self.ranks = launch.tensor_parallel
        self.http: list[Child] = []
        self.internal: InternalServer | None = None
        self.stop_now = False
        self.causes = Causes(self.keeper, self.device)
        self.drain_seconds = options.drain or launch.drain_seconds or options.timeouts.drain

    def run(self, until: Callable[[], bool] | None = None) -> int:
        """Serves until a signal, a failure, or `until` returns true; returns the exit code."""
        try:
            self._check_flags()
            listeners = self._open_ports()
            bounds = grammar_bounds(self.device, container_limit())
            self.grammars = grammars = GrammarProcess(self.options, bounds, log)
            shared = grammars.service, self.pixel_fds
            self.http = start_http(self.options, self.clients, listeners, *shared)
            for index, child in enumerate(self.http):
                child.follow(partial(self._from_http, index))
                listeners[index].close()  # only its process keeps it open
            self._start_engine()
            if until is None:
                return self._watch(lambda: False, self._announce, self.narrator)
            return self._watch(until, lambda: True)
        except ServerError as error:
            return self._end(error.termination())
        finally:
            working = self.engine is not None and self.engine.working
            for child in self.http:
                child.kill()
            if self.engine is not None:
                self.engine.kill()
            if self.grammars is not None:
                self.grammars.close()
            if self.causes.interrupted or (working and self.health.draining):
                self._attempts().interrupt()

    def stop(self) -> None:
        """Drains on SIGTERM or Ctrl-C; exits at once on a second one."""
        self.stop_now = self.health.draining
        self.health.draining = True

    def _watch(
        self, until: Callable[[], bool], announce: Callable[[], bool], tells: Narrator | None = None
    ) -> int:
        drain, announced = None, False
        while not until():
            self._watch_progress()
            self._tend_grammars()
            if tells is not None:
                self._tell_stage(tells)
            announced = announced or announce()
            if self.health.draining and drain is None:
                drain = DrainState(self.drain_seconds)
                self._tell_http(Drain(self.drain_seconds))
            if drain is not None and self._is_drained(drain):
                log(drain.summary(self.health.edge))
                return int(ExitCode.DRAINED)
            failure = self._failure()
            if failure is not None:
                return self._end(failure)
            self.health.read_gate()
            time.sleep(self.options.timeouts.poll)
        return int(ExitCode.DRAINED)

    def _watch_progress(self) -> None:
        engine = self.engine.pids if self.engine is not None else []
        http = [child.process.pid for child in self.http]
        self.health.watch(engine, http)
        if self.keeper.report.state is not State.VALIDATED:
            self.starting.watch([*engine, *http])

    def _tend_grammars(self) -> None:
        """On a CPU the engine waits for a process of theirs that starts: it measures all memory."""
        assert self.grammars is not None
        self.grammars.tend()
        waiting = self.engine if self.engine is not self.notified else None
        settled = self.device is not Device.CPU or self.grammars.settled
        if waiting is not None and self.health.edge.ready and settled:
            self.notified = waiting
            waiting.first.tell(NeighboursReady())

    def _is_drained(self, drain: DrainState) -> bool:
        ended = self._ended_http()
        for index in ended:
            self.health.on_http_drained(index)
        if len(ended) == len(self.http):
            self._end_engine()
            hear_last_words(self.http)  # what they counted
            return True
        if self.stop_now and not drain.hurried:
            drain.hurry()
            self._tell_http(Drain(0.0))
        return drain.is_over()

    def _ended_http(self) -> list[int]:
        return [i for i, child in enumerate(self.http) if child.process.poll() is not None]

    def _end_engine(self) -> None:
        """Does not wait for its end, as the driver takes time to free a GPU's memory."""
        if self.engine is not None and self.engine.working:
            self.causes.interrupted = True
            self.engine.end(None)

    def _announce(self) -> bool:
        """Logs one line once the server is ready."""
        report, o = self.keeper.report, self.options
        if report.result is None or report.effective is None or not self.health.edge.connected:
            return False
        device = report.provenance.gpu if report.provenance is not None else self.device
        log(
            f"ready: {self.served} on {device}, {report.result.kv_tokens} KV tokens, "
            f"{report.effective.max_model_len} a request at most; "
            f"API on {shown(o.host, self.port)}, "
            f"probes and metrics on {shown(o.host, self.internal_port)}"
        )
        return True

    def _end(self, failure: Termination) -> int:
        self.keeper.fail(failure)
        return leave(failure, self.options.from_flags, self.options.termination_log)

    def _open_ports(self) -> list[socket.socket]:
        """Opens both ports. The internal one answers from here on; the API port is bound early, so
        that a taken port fails early."""
        o = self.options
        try:
            self.internal = InternalServer(o.host, o.internal_port, self.health)
        except OSError as error:
            raise _not_opened("internal port", o.host, o.internal_port, error) from None
        self.internal_port = self.internal.server_port  # the kernel's choice for port 0
        self.internal.start()
        try:
            listeners = listen(o.host, o.port, self.processes)
        except OSError as error:
            raise _not_opened("API port", o.host, o.port, error) from None
        self.port = listeners[0].getsockname()[1]
        return listeners

    def _clients(self) -> ClientLimits:
        memory = container_limit()
        limits = self.options.clients.on(self.device, memory)
        if self.device is Device.CUDA and limits != self.options.clients:
            self.keeper.warn(
                f"host memory is {(memory or 0) >> 20} MiB: clients have the CPU's lower limits; "
                f"spec.resources.memory: {LARGE_HOST >> 30}Gi gives them a GPU's"
            )
        return limits

    def _check_flags(self) -> None:
        asked, record = self.options.memory, self.options.record
        if asked is not None and self.device is Device.CPU:
            self._warn(check_memory(asked, container_limit(), *machine_memory()))
        if record is not None and self.options.from_flags:  # a pod's may be missing, or damaged
            why = unreadable(record)
            self._warn(why and f"--record {why}; no record is used")

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self.keeper.warn(text)
            self._log_warning(text)

    def _start_engine(self) -> None:
        self.health.engine_starts += 1
        self.health.on_engine_heartbeat()
        self.causes.engine_starts()
        options = self._with_memory()
        service = self.grammars.service if self.grammars is not None else None
        self.engine = EngineProcesses(
            options, self.processes, self.ranks, self._from_engine, service, self.pixel_fds
        )

    def _with_memory(self) -> Options:
        """Ranks on a CPU divide one figure: each would find another amount free."""
        if self.device is not Device.CPU or self.ranks == 1:
            return self.options
        limit, bounded = host_limit(self.options.memory, os.getpid())
        if not bounded and self.options.memory is None:
            self.keeper.warn(unbounded(limit))
        return replace(self.options, memory=limit)

    def _from_http(self, process: int, message: Message) -> None:
        if isinstance(message, EdgeBeat):
            self.health.on_http_heartbeat(process, message)
        elif isinstance(message, Progress):
            self._log_warning(message.warning)
            self.keeper.apply(message)  # or it says why it must end

    def _from_engine(self, rank: int, message: Message) -> None:
        if rank:
            self.keeper.touch()  # it loads, whatever rank 0 waits for
            text = message.warning if isinstance(message, Progress) else None
            if text is not None and self.keeper.warn(text, rank):
                self._log_warning(f"rank {rank}: {text}")
        elif isinstance(message, Beat):
            self.health.on_engine_heartbeat(message)
        elif isinstance(message, Progress):
            self.health.on_engine_heartbeat()
            self.keeper.apply(message)
            if message.current is not None:  # the next one may come before the next poll
                self._tell_stage(self.narrator)
            if message.result is not None:
                self._serve()
            self._log_warning(message.warning)

    def _log_warning(self, text: str | None) -> None:
        if text is not None:
            log(f"warning: {with_flag_names(text) if self.options.from_flags else text}")

    def _tell_stage(self, narrator: Narrator) -> None:
        narrator.tell(self.keeper.report, time.monotonic(), datetime.now(UTC))

    def _serve(self) -> None:
        effective, result = self.keeper.report.effective, self.keeper.report.result
        assert effective is not None and result is not None, "a result without its settings"
        if self.engine is not None:
            for child, connection in zip(self.http, self.engine.first.others, strict=True):
                child.hand(connection)
        self._tell_http(Serve(effective, result.kv_tokens, result.sequence_tokens))

    def _tell_http(self, message: Message) -> None:
        for child in self.http:
            child.tell(message)

    def _failure(self) -> Termination | None:
        """Why the pod must end, if it must. Restarts an engine that was killed while sizing."""
        if (invalid := self._invalid()) is not None:
            self.causes.interrupted = True
            self._end_with_answers()
            return Termination.of(ExitCode.ENGINE_DIED, invalid)
        ended = [self.http[index] for index in self._ended_http()]
        if ended and not self.health.draining:
            hear_last_words(ended)
            code = ended[0].process.returncode
            failure = self.keeper.report.failure or self.causes.of_process("HTTP", code)
            self._end_with_answers()
            return failure
        engine, limit = self.engine, self.options.timeouts.rank
        if engine is None:
            return self._stalled()
        silent = engine.silent(limit)
        if silent is None and not engine.over():
            return self._stalled()
        self.health.engine_gone = True
        end = engine.end(silent)
        if self.causes.may_shrink(end):
            engine.kill()
            if end.step_failed:
                self._attempts().fail()
            self.keeper.restart(
                end.step_failed or "the engine was killed for memory while it validated a size"
            )
            self.health.engine_gone = False
            self._start_engine()
            return None
        self._wait_for_answers()
        return self.causes.of_engine(end, limit)

    def _invalid(self) -> str | None:
        """What a child sent that is no message: its heartbeats and last words are lost with it."""
        every = [("an HTTP process", child) for child in self.http]
        if self.engine is not None:
            every += [(f"rank {rank}", child) for rank, child in enumerate(self.engine.ranks)]
        found = (f"{name} {child.invalid}" for name, child in every if child.invalid)
        return next(found, None)

    def _end_with_answers(self) -> None:
        """Where something else ends the pod: at the engine's end HTTP answers what is open."""
        self.health.engine_gone = True
        if self.engine is not None:
            self.engine.end(None)
        self._wait_for_answers()

    def _wait_for_answers(self) -> None:
        """Until clients have the errors of the requests that the engine's end has left. What a busy
        node keeps from HTTP is not counted."""
        began, http = time.monotonic(), [child.process.pid for child in self.http]
        waits = Quiet(lambda: began)
        while self.health.owes_answers(self._ended_http()):
            waits.watch(http)
            if waits.seconds() > END_SECONDS or waits.by_the_clock() > MOST_END_SECONDS:
                return
            time.sleep(self.options.timeouts.poll / 10)

    def _attempts(self) -> AttemptStore:
        return AttemptStore(self.options.state_dir / ATTEMPTS_FILE)

    def _stalled(self) -> Termination | None:
        """Ends a start without progress, and what serves and makes none."""
        engine, state = self.engine, self.keeper.report.state
        if engine is None:
            return None
        if state is State.VALIDATED:
            return None if self.health.draining else self._serves_no_more()
        limit, quiet = self.options.timeouts.stage, self.starting.seconds()
        thrashes = stalls.patience(self.keeper.probed_ms, limit)
        if state is State.VALIDATING and self.device is Device.CPU and quiet > thrashes:
            self.causes.thrashed = True
            engine.first.kill()
            return None
        if quiet < limit:
            return None
        silent = engine.without_pulse() if self.ranks > 1 else ()
        current = self.keeper.report.current
        waits = current is not None and current.name == WAITS_FOR_HTTP
        http = self.health.edge.ready or not waits
        failure = stalls.of_a_start(state, limit, self.ranks, silent, http)
        self.causes.interrupted |= failure.code == int(ExitCode.RANK_LOST)
        return failure

    def _serves_no_more(self) -> Termination | None:
        text = self.health.no_progress()
        if text is None:
            return None
        self._end_with_answers()
        return Termination.of(ExitCode.NO_PROGRESS, text)


def _not_opened(what: str, host: str, port: int, error: OSError) -> ServerError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigInvalid(f"--host {host} is no address of this machine: {error.strerror}")
    return PortTaken(f"{what} {shown(host, port)}: {error.strerror}")
