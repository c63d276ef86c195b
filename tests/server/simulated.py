"""A simulated device, or several: the profile loop runs against it in milliseconds.

A batch takes its tokens times a price; beyond the limit an allocation raises the error of a real
device or, where the kernel would kill the process, an exception that nothing catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import torch

from kvline_contract.memory import KV_CACHE, WEIGHTS
from kvline_contract.report import Attempt, Current, State
from kvline_server.engine.stress.owners import StressSet
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.kernels.attention import SHORT_CHUNKS
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import KVShape
from kvline_server.memory.device import MIB
from kvline_server.memory.groups import CacheGroup
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.parts import OwnedPart
from kvline_server.parallel.executor import Forward, Usage
from kvline_server.sizing.loaded import exchanged
from kvline_server.sizing.settings import EngineSettings
from kvline_server.worker.step import Results, Step

BYTES_PER_TOKEN = 4096
T = TypeVar("T")


class Killed(BaseException):
    """The kernel's SIGKILL: nothing in the loop may catch it."""


class Apart(Exception):
    """The end of ranks of which one ran out of memory while the others waited for it."""


@dataclass
class Machine:
    """Device and executor in one."""

    limit: int
    weights: int
    price: int  # bytes a batch's token takes while the batch runs
    context_price: int = 0  # and each token of its longest sequence
    slack: int = 0
    surprise: int = 0  # what a batch takes more while the canary is held, at the final size
    trial: int | None = None  # bytes that the trial of kernels takes; None: nothing to try
    graphs: int = 0  # bytes that captured graphs take; capturing leaves as much to be settled
    scratch: int = 0  # bytes that meeting row counts leaves until memory is settled
    kills: bool = False
    encoder: None = None
    gpu: bool = False
    name: str = "simulated"
    driver: str = "0"
    pages: tuple[int, ...] = (0,)
    taken: int = 0  # by the canary
    highest: int = 0
    steps: list[Step] = field(default_factory=list)  # launched
    left: int = 0
    captured: int = 0
    experts: int = 0  # bytes of the weights that are a part of their own

    # The device

    def used(self) -> int:
        return self.weights + self.nbytes + self.taken + self.left + self.captured

    now = used

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.highest = self.used()

    def keep_peak(self, again: bool) -> bool:
        return True

    def working_files(self) -> int:
        return 3 * MIB

    def settle(self) -> None:
        self.left = 0

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        self._take(nbytes)
        self.taken = nbytes
        try:
            yield
        finally:
            self.taken = 0

    def _take(self, nbytes: int) -> None:
        if self.used() + nbytes + self.working_files() > self.limit:
            raise Killed if self.kills else DeviceOutOfMemory("simulated")
        self.highest = max(self.highest, self.used() + nbytes)

    # The executor

    @property
    def owned(self) -> tuple[OwnedPart, ...]:
        experts = (OwnedPart("experts", fixed=self.experts),) if self.experts else ()
        weights = OwnedPart(WEIGHTS, fixed=self.weights - self.experts)
        return (weights, *experts, OwnedPart(KV_CACHE, per_token=BYTES_PER_TOKEN))

    windows = (0,)
    vocabulary = 1000
    groups = (CacheGroup(0, (0,), KVShape(1, 1, BYTES_PER_TOKEN // 8, torch.float32)),)

    @property
    def stress(self) -> StressSet:
        return StressSet(short_chunks=SHORT_CHUNKS if self.gpu else ())

    @property
    def nbytes(self) -> int:
        return self.pages[0] * PAGE_SIZE * BYTES_PER_TOKEN

    def resize(self, pages: tuple[int, ...]) -> None:
        self._take((pages[0] - self.pages[0]) * PAGE_SIZE * BYTES_PER_TOKEN)
        self.pages = pages

    ranks = 1
    pids: ClassVar[tuple[int, ...]] = ()  # no process that can wait for a CPU
    depth = 0

    def usage(self) -> tuple[Usage, ...]:
        kv, files = self.nbytes, self.working_files()
        return (Usage(self.limit, self.used(), self.now(), self.peak(), kv, files),)

    @property
    def tunes(self) -> bool:
        return self.trial is not None

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        if self.trial is None:
            return None
        if known is not None:
            return known
        assert not self.pages[0], "a trial must find no cache mapped"
        self._take(self.trial)
        return {(max_rows, 64, 32): 1}

    def warm_up(self, max_rows: int) -> int:
        self.left = self.scratch
        return int(bool(self.scratch))

    def capture(self, max_rows: int, longest: int) -> bool:
        self.captured = self.left = self.graphs
        return bool(self.graphs)

    def launch(self, step: Step) -> Machine:
        self.steps.append(step)
        extra = self.surprise if self.taken else 0
        longest = int(step.layout.groups[0].lengths.max())
        self._take(len(step.tokens) * self.price + longest * self.context_price + extra)
        return self

    def forward(self, step: Step) -> Forward:
        raise AssertionError("sizing knows the constraints of its steps")

    def rehearse(self, step: Step) -> None:
        return

    def wait(self) -> Results:
        return Results(np.empty(0, np.int64), None, None)


@dataclass
class Gpu(Machine):
    """Counts as a GPU does: cache, graphs, canary and collectives are outside torch's allocator."""

    gpu: bool = True
    neighbour: int = 0  # bytes of other processes
    collectives: int = 0  # bytes of the exchange between ranks

    def used(self) -> int:
        return super().used() + self.neighbour + self.collectives

    def now(self) -> int:
        return self.weights + self.left

    def peak(self) -> int:
        return max(self.highest, self.now())

    def reset_peak(self) -> None:
        self.highest = self.now()

    def working_files(self) -> int:
        return 0

    def _take(self, nbytes: int) -> None:
        if self.used() + nbytes > self.limit:
            raise DeviceOutOfMemory("simulated")
        self.highest = max(self.highest, self.now() + nbytes)

    @property
    def owned(self) -> tuple[OwnedPart, ...]:
        taken = (exchanged(self.collectives),) if self.collectives else ()
        return (*super().owned, *taken)


@dataclass
class Fault:
    """An out-of-memory error of one rank at a stage, so many times. Stages: tune, warm-up, first
    pages, capture, probe alone, probe together, map, hold, validate alone, validate together."""

    stage: str
    rank: int
    times: int

    def strike(self, stage: str, rank: int) -> None:
        if (stage, rank) == (self.stage, self.rank) and self.times:
            self.times -= 1
            raise DeviceOutOfMemory("injected")


NO_FAULT = Fault("none", 0, 0)


class Together:
    """Several machines as one executor, which keeps its contract: each acts to the end, then all
    vote. A launch together whose step was not rehearsed on every rank fails the test."""

    depth = 0
    pids: ClassVar[tuple[int, ...]] = ()  # no process that can wait for a CPU

    def __init__(self, machines: Sequence[Machine], fault: Fault = NO_FAULT) -> None:
        self.machines = machines
        self.fault = fault
        self.apart = False
        self.rehearsed: Step | None = None

    encoder: None = None
    windows = (0,)
    vocabulary = 1000

    @property
    def ranks(self) -> int:
        return len(self.machines)

    @property
    def pages(self) -> tuple[int, ...]:
        (pages,) = {machine.pages for machine in self.machines}
        return pages

    @property
    def tunes(self) -> bool:
        return self.machines[0].tunes

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        return self._all("tune", lambda machine: machine.tune(max_rows, known))[0]

    def warm_up(self, max_rows: int) -> int:
        return self._all("warm-up", lambda machine: machine.warm_up(max_rows))[0]

    def capture(self, max_rows: int, longest: int) -> bool:
        return self._all("capture", lambda machine: machine.capture(max_rows, longest))[0]

    def rehearse(self, step: Step) -> None:
        self.rehearsed = None
        self._all(f"{self._phase()} alone", lambda machine: machine.launch(step))
        self.rehearsed = step

    def launch(self, step: Step) -> Machine:
        assert step is self.rehearsed, "launched together without a rehearsal on every rank"
        try:
            return self._all(f"{self._phase()} together", lambda machine: machine.launch(step))[0]
        except DeviceOutOfMemory as error:
            self.apart = True
            raise Apart(f"rank {error.rank}") from error

    def forward(self, step: Step) -> Forward:
        return self.machines[0].forward(step)

    def resize(self, pages: tuple[int, ...]) -> None:
        before = self.pages
        stage = ("map" if any(before) else "first pages") if pages > before else "unmap"
        try:
            self._all(stage, lambda machine: machine.resize(pages))
        except DeviceOutOfMemory:
            for machine in self.machines:
                machine.pages = before
            raise

    def usage(self) -> tuple[Usage, ...]:
        return tuple(self._all("usage", lambda machine: machine.usage()[0]))

    def settle(self) -> None:
        self._all("settle", lambda machine: machine.settle())

    def reset_peak(self) -> None:
        self._all("reset", lambda machine: machine.reset_peak())

    def keep_peak(self, again: bool) -> bool:
        return all(self._all("keep", lambda machine: machine.keep_peak(again)))

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        with ExitStack() as stack:
            self._all("hold", lambda machine: stack.enter_context(machine.held(nbytes)))
            yield

    def _phase(self) -> str:
        return "validate" if self.machines[0].taken else "probe"

    def _all(self, stage: str, act: Callable[[Machine], T]) -> list[T]:
        assert not self.apart, "nobody answers any more"
        results, failed = [], []
        for rank, machine in enumerate(self.machines):
            try:
                self.fault.strike(stage, rank)
                results.append(act(machine))
            except DeviceOutOfMemory as error:
                failed.append(DeviceOutOfMemory(str(error), rank))
        if failed:
            raise failed[0]
        return results


@dataclass
class Notes:
    """Keeps what the loop reports."""

    states: list[State] = field(default_factory=list)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    stages: dict[str, str | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    currents: list[Current] = field(default_factory=list)

    def __call__(self, progress: Progress) -> None:
        if progress.current is not None:
            self.currents.append(progress.current)
        if progress.state is not None:
            self.states.append(progress.state)
        if progress.stage is not None:
            self.stages[progress.stage.name] = progress.stage.detail
        if progress.warning is not None:
            self.warnings.append(progress.warning)
        if progress.effective is not None:
            self.lengths.append(progress.effective.max_model_len)
        if progress.attempt is not None:
            self.attempts[progress.attempt.number] = progress.attempt


SETTINGS = EngineSettings(
    max_model_len=None,
    model_max_len=1024,
    max_running_requests=4,
    max_prefill_tokens=128,
    max_top_logprobs=5,
    headroom_mib=8,
    logprob_rows=64,
    pinned_kv_tokens=None,
)
