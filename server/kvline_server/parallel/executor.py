"""Runs steps on every device of a pod. `Local` has one device, in its own process; `Ranks`
(ranks.py) sends each call and each step to the Local of every rank's process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvline_server.kernels.tuning import Choices
from kvline_server.memory.device import Device
from kvline_server.worker.encoder import Encoder, Image
from kvline_server.worker.step import Constraints, InFlight, Step
from kvline_server.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one rank's device, in bytes."""

    limit: int
    used: int  # by all processes
    now: int  # by this rank
    peak: int  # the highest `now` since the last reset
    kv: int  # of the KV cache; part of `now` on a CPU alone
    files: int = 0  # file pages that must stay in memory (Device.working_files)


class Forward(Protocol):
    """A step up to what its tokens are sampled from."""

    def sample(self, constraints: Constraints) -> InFlight:
        """Launches the rest, with these constraints in the place of the step's own."""


class ImageEncoder(Protocol):
    """worker.encoder.Encoder, of one rank or several."""

    def begin(self, images: Sequence[Image], rows: NDArray[np.int64]) -> list[int]:
        """-> the places of all images whose pixels are not those of their digest: where there are
        some, no rank goes on, and the next begin drops what has begun."""

    def run(self, layers: int) -> bool: ...


class Executor(Protocol):
    """Of one rank or several. What raises DeviceOutOfMemory names the rank, and leaves every rank
    in the same state: with as many pages as before, and nothing held. A launch of several ranks may
    leave the others waiting for one that failed; what it raises then is no DeviceOutOfMemory, and
    only a new start helps."""

    @property
    def ranks(self) -> int: ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Of each rank's process."""

    @property
    def depth(self) -> int:
        """Steps in flight while the host prepares the next one."""

    @property
    def tunes(self) -> bool:
        """Whether `tune` has anything to choose."""

    @property
    def vocabulary(self) -> int:
        """Tokens of the model."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group of layers (memory/groups.py), 0 for none."""

    @property
    def pages(self) -> tuple[int, ...]:
        """Of the KV cache of each group, the dummy page included."""

    @property
    def encoder(self) -> ImageEncoder | None:
        """None where text alone is served."""

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None: ...

    def warm_up(self, max_rows: int) -> int: ...

    def capture(self, max_rows: int, longest: int) -> bool: ...

    def launch(self, step: Step) -> InFlight: ...

    def forward(self, step: Step) -> Forward:
        """The first part of a step whose constraints are not known yet. Nothing else is launched
        before it has been sampled."""

    def rehearse(self, step: Step) -> None:
        """Runs a step on each rank without the others, to its end: where a device has too little
        memory, no rank waits for it. Results mean nothing. Nothing to do on one rank."""

    def resize(self, pages: tuple[int, ...]) -> None:
        """Maps or unmaps pages at the end of every rank's cache, of each group. Raises
        DeviceOutOfMemory."""

    def usage(self) -> tuple[Usage, ...]:
        """By rank."""

    def settle(self) -> None:
        """Device.settle, on every rank."""

    def reset_peak(self) -> None:
        """Device.reset_peak, on every rank."""

    def keep_peak(self, again: bool) -> bool:
        """Device.keep_peak, on every rank. -> whether all peaks are known"""

    def held(self, nbytes: int) -> AbstractContextManager[None]:
        """Device.held, on every rank or, after an error, on none."""


class Local:
    ranks = 1

    def __init__(self, worker: Worker, device: Device, encoder: Encoder | None = None) -> None:
        self.encoder = encoder
        self.pids = (os.getpid(),)
        self.worker = worker
        self.device = device
        self.tune, self.warm_up, self.capture = worker.tune, worker.warm_up, worker.capture
        self.resize = worker.arena.resize
        self.settle, self.held = device.settle, device.held
        self.reset_peak, self.keep_peak = device.reset_peak, device.keep_peak

    @property
    def depth(self) -> int:
        return self.worker.kernels.depth

    @property
    def tunes(self) -> bool:
        return self.worker.kernels.gemms.tunes

    @property
    def vocabulary(self) -> int:
        return self.worker.vocabulary.size

    @property
    def windows(self) -> tuple[int, ...]:
        return self.worker.decoder.windows

    @property
    def pages(self) -> tuple[int, ...]:
        return self.worker.arena.pages

    def launch(self, step: Step) -> InFlight:
        return self.worker.launch(step)

    def forward(self, step: Step) -> Forward:
        return self.worker.forward(step)

    def rehearse(self, step: Step) -> None:
        return

    def usage(self) -> tuple[Usage, ...]:
        device = self.device
        kv, files = self.worker.arena.nbytes, device.working_files()
        return (Usage(device.limit, device.used(), device.now(), device.peak(), kv, files),)
