"""What the steps of a start share: the devices, what is measured of them, and what is reported."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter

from kvline_contract import times
from kvline_contract.progress import ready_at
from kvline_contract.report import START_STAGES, Current, Stage, State
from kvline_server.engine.stress.bounds import Bounds
from kvline_server.engine.stress.owners import Make, Play
from kvline_server.ipc.messages import Progress, SendProgress
from kvline_server.memory import parts
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.groups import CacheSizes
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.parts import OwnedPart
from kvline_server.options.timeouts import LONGEST_STEP
from kvline_server.sizing import pace
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.measure import Measurement
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.remaining import Remaining
from kvline_server.sizing.settings import EngineSettings
from kvline_server.sizing.spent import Spent

PROBE_PAGES = 64
PROBE_TOKENS = PROBE_PAGES * PAGE_SIZE
MAX_TRIES = 4
STEP_TRIES = 3
NEIGHBOUR_PAUSE = 15.0  # seconds


@dataclass
class Session:
    device: Device  # of rank 0, for what is the same on all
    settings: EngineSettings
    loaded: Loaded
    send: SendProgress
    store: AttemptStore
    pause: Callable[[float], None]
    free_before_weights: tuple[int, ...]  # of each rank, before collectives too
    longest_step: float = LONGEST_STEP  # seconds
    clock: Callable[[], float] = time.monotonic
    current: Current | None = None
    remaining: Remaining = field(default_factory=Remaining)
    expected: float | None = None  # the clock's time at which a record says that the start ends
    sizes: CacheSizes = field(init=False)
    measured: Measurement = field(init=False)

    def __post_init__(self) -> None:
        self.executor = self.loaded.executor
        loaded, free, settings = self.loaded, self.free_before_weights, self.settings
        self.sizes = settings.cache(loaded.groups)
        self.measured = Measurement(
            self.executor,
            self.device,
            settings,
            loaded.owned,
            free,
            loaded.note,
        )

    def begin(self, stage: int, what: str, state: State | None = None) -> None:
        """Reports the stage that begins, with its state in one update: each is a change of the
        service's condition."""
        self.current = Current(stage, START_STAGES, what, times.now())
        self.at(state=state)

    def at(
        self,
        name: str | None = None,
        step: int | None = None,
        steps: int | None = None,
        rest: float | None = None,
        state: State | None = None,
    ) -> None:
        """Reports what the stage does: a step, or something else with a name. `rest`: seconds that
        the start may take from now; without it a record tells, if there is one."""
        if self.current is None:
            return
        if rest is None and self.expected is not None:
            rest = self.expected - self.clock()
        when = ready_at(datetime.now(UTC), rest) if rest is not None and rest > 0 else None
        self.current = replace(self.current, name=name, step=step, steps=steps, ready_at=when)
        self.send(Progress(state=state, current=self.current))

    @property
    def free_mib(self) -> int:
        """Before weights, of the rank with the least."""
        return min(self.free_before_weights) // MIB

    @property
    def bytes_per_token(self) -> int:
        """Of a rank, with what is reserved beside each."""
        return parts.per_token(self.owned)

    @property
    def owned(self) -> tuple[OwnedPart, ...]:
        """Of a rank, what settings lend included."""
        return (*self.loaded.owned, *self.settings.lent)

    def map_probe(self) -> None:
        """As few pages as steps run with, whose page tables repeat them. Raises
        DeviceOutOfMemory."""
        self.executor.resize((PROBE_PAGES,) * len(self.loaded.groups))

    def map(self, tokens: int) -> None:
        """A KV cache of so many tokens. Raises DeviceOutOfMemory."""
        self.executor.resize(self.sizes.pages(tokens))

    def lowest_free(self) -> int:
        """MiB."""
        return min(self.measured.free_at_peak()) // MIB

    def run_stress(self, max_model_len: int, aliased: int = 0) -> None:
        """The stress set with contexts of so many tokens, on pages of their own, or on the mapped
        ones for `aliased` tokens in all. With several ranks each runs a step alone before they run
        it together: one that lacks memory is known before another waits for it."""
        limit = math.inf if aliased else self.longest_step
        groups = self._stress_set(max_model_len, aliased)
        names = [name for name, _ in groups]
        before, spent = self.device.now(), Spent(self.executor.ranks)
        try:
            for index, (name, plays) in enumerate(groups):
                rest = self.remaining.rest(names[index:], names, bool(aliased))
                self.at(name, index + 1, len(names), rest)
                began = self.clock()
                for play in plays:
                    spent.count_play(play.how, *self._run_step(play.make, limit))
                seconds = self.clock() - began
                spent.count(name, seconds, self.device.now() - before)
                self.remaining.note(name, seconds)
        finally:  # of a stress that fails, too, it tells which steps did not
            if spent.steps:
                stage = spent.stage("stress" if aliased else "validate")
                self.send(Progress(stage=stage, probed_ms=spent.slowest_ms if aliased else None))

    def _stress_set(self, max_model_len: int, aliased: int) -> list[tuple[str, list[Play]]]:
        """By name, in order."""
        settings = self.settings
        bounds = Bounds(
            max_running_requests=settings.max_running_requests,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_top_logprobs=settings.max_top_logprobs,
            max_model_len=max_model_len,
            vocabulary=self.loaded.vocabulary,
            windows=self.executor.windows,
            pages=self.executor.pages,
            logprob_rows=settings.logprob_rows,
            ranks=self.executor.ranks,
            aliased=aliased,
            draft_tokens=settings.draft_tokens,
            recurrent=settings.recurrent,
            snapshots=settings.snapshots,
            draft_states=settings.draft_states,
        )
        by_name = itertools.groupby(self.loaded.stress.plays(bounds), key=attrgetter("name"))
        return [(name, list(plays)) for name, plays in by_name]

    def _run_step(self, make: Make, limit: float = math.inf) -> tuple[float, float]:
        """Once more while its peak is not known (Device.keep_peak). -> seconds that every rank
        alone took, and in all; raises StepTooLong where all together take longer than `limit`"""
        for again in range(STEP_TRIES - 1, -1, -1):
            batch, started = make(), self.clock()
            if self.executor.ranks > 1:
                self.executor.rehearse(batch.step)
            alone = self.clock() - started
            self.executor.launch(batch.step).wait()
            whole = self.clock() - started
            if self.executor.keep_peak(again > 0):
                break
        if whole - alone > limit:
            step, pids = batch.step, self.executor.pids
            pace.check(
                step,
                lambda: self.executor.launch(step).wait(),
                limit,
                self.settings,
                pids,
                self.clock,
            )
        return alone, whole

    @contextmanager
    def stage(self, name: str, *details: str) -> Iterator[list[str]]:
        """Reports a stage with its time and the memory that it left on rank 0. The caller may add
        details to the list that it yields."""
        before, start, texts = self.device.now(), self.clock(), list(details)
        yield texts
        ms = round((self.clock() - start) * 1000)
        self.send(
            Progress(stage=Stage(name, ms, self.device.now() - before, ", ".join(texts) or None))
        )


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE
