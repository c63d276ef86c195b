"""Rank 0's executor of several ranks: each call runs here and on every other rank (follow.py), and
ends everywhere before it returns. So whatever fails on one rank, all are in the same state again.

What may fail for lack of memory outside a step runs without collectives (Group.apart): no rank ever
waits in one for a rank that has failed before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory, RankLost, StepFailed
from kvline_server.ipc.messages import (
    Answer,
    Call,
    Encode,
    EncodedImage,
    EncodeLayers,
    Run,
    Sample,
)
from kvline_server.kernels.group import Group
from kvline_server.kernels.tuning import Choices
from kvline_server.memory import device_errors
from kvline_server.parallel.executor import Forward, ImageEncoder, Local, Usage
from kvline_server.parallel.link import Link
from kvline_server.parallel.wire import Steps
from kvline_server.worker.encoder import Encoder, Image
from kvline_server.worker.step import Constraints, InFlight, Results, Step

T = TypeVar("T")
ANSWER_SECONDS = 300.0  # no call takes as long; what only stops is noticed sooner, by its pulse
TURN = 1e-4  # seconds between two reads of a buffer that is still being read


class Ranks:
    def __init__(
        self,
        local: Local,
        group: Group,
        links: Sequence[Link],
        steps: Steps,
        patience: float = ANSWER_SECONDS,
        pids: tuple[int, ...] = (),
    ) -> None:
        """`links`: one to each other rank, in their order; `patience`: seconds for an answer;
        `pids`: of each rank's process."""
        self.local = local
        self.ranks = 1 + len(links)
        self.pids = pids
        self._group = group
        self._links = links
        self._steps = steps
        self._patience = patience
        self._lost = False  # nobody answers any more, and nobody is asked

    @property
    def depth(self) -> int:
        return self.local.depth

    @property
    def tunes(self) -> bool:
        return self.local.tunes

    @property
    def vocabulary(self) -> int:
        return self.local.vocabulary

    @property
    def windows(self) -> tuple[int, ...]:
        return self.local.windows

    @property
    def pages(self) -> tuple[int, ...]:
        return self.local.pages

    @property
    def encoder(self) -> ImageEncoder | None:
        here = self.local.encoder
        return None if here is None else _EncoderTogether(here, self)

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        """Rank 0 chooses, and the others take its choices: one kernel for a shape on all ranks."""
        try:
            with device_errors.translated("tune"), self._group.apart():
                choices = self.local.tune(max_rows, known)
        except (DeviceOutOfMemory, DeviceFailure) as error:
            raise _named(error, 0) from error
        taken = [(*shape, kernel) for shape, kernel in (choices or {}).items()]
        _, answers = self._each(Call("tune", [max_rows], taken), lambda: None)
        if any(answer.numbers != [1] for answer in answers):
            raise DeviceFailure("a GEMM kernel that rank 0 chose is not there on another rank")
        return choices

    def warm_up(self, max_rows: int) -> int:
        counts, _ = self._each(Call("warm_up", [max_rows]), lambda: self.local.warm_up(max_rows))
        return counts

    def capture(self, max_rows: int, longest: int) -> bool:
        captured, answers = self._each(
            Call("capture", [max_rows, longest]), lambda: self.local.capture(max_rows, longest)
        )
        if any(answer.numbers != [captured] for answer in answers):
            raise DeviceFailure("graphs were captured on some of the ranks only")
        return captured

    def launch(self, step: Step) -> InFlight:
        """Raises StepFailed in the place of DeviceOutOfMemory: the others are in the step."""
        with self._in_step():
            self._send(Run(self._write(step)))
            return _Together(self.local.launch(step), self)

    def forward(self, step: Step) -> Forward:
        """Raises as launch does."""
        with self._in_step():
            self._send(Run(self._write(step), samples=False))
            return _ForwardTogether(self.local.forward(step), self)

    def _send(self, message: Run | Sample | EncodeLayers) -> None:
        for link in self._links:
            link.send(message, self._patience)

    def rehearse(self, step: Step) -> None:
        with self._or_lost():
            buffer = self._write(step)
        self._each(Call("rehearse", [buffer]), lambda: self.local.worker.rehearse(step))

    def resize(self, pages: tuple[int, ...]) -> None:
        before = self.pages
        try:
            self._each(Call("resize", [*pages]), lambda: self.local.resize(pages))
        except DeviceOutOfMemory:
            smaller = tuple(map(min, before, pages))
            self._each(Call("resize", [*smaller]), lambda: self.local.resize(smaller))
            raise

    def usage(self) -> tuple[Usage, ...]:
        (here,), answers = self._each(Call("usage"), self.local.usage)
        return (here, *(Usage(*answer.numbers) for answer in answers))

    def settle(self) -> None:
        self._each(Call("settle"), self.local.settle)
        self._steps.trim()

    def reset_peak(self) -> None:
        self._each(Call("reset_peak"), self.local.reset_peak)

    def keep_peak(self, again: bool) -> bool:
        here, answers = self._each(
            Call("keep_peak", [int(again)]), lambda: self.local.keep_peak(again)
        )
        return here and all(answer.numbers[0] for answer in answers)

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        here = ExitStack()
        try:
            self._each(Call("hold", [nbytes]), lambda: here.enter_context(self.local.held(nbytes)))
            yield
        finally:
            if self._lost:
                here.close()
            else:
                self._each(Call("release"), here.close)

    def _write(self, step: Step) -> int:
        end = time.monotonic() + self._patience

        def wait() -> None:
            for link in self._links:
                link.check()
            if time.monotonic() > end:
                raise RankLost(f"a rank runs no steps for {self._patience:g} s")
            time.sleep(TURN)

        return self._steps.write(step, wait)

    def _each(self, call: Call | Encode, here: Callable[[], T]) -> tuple[T, list[Answer]]:
        """Sends the call, does the same here, and waits until it has ended on every rank. Raises
        what failed, of the first rank where something did."""
        failed: DeviceOutOfMemory | DeviceFailure | None = None
        with self._or_lost():
            for link in self._links:
                link.send(call, self._patience)
            try:
                name = call.name if isinstance(call, Call) else "encode"
                with device_errors.translated(name), self._group.apart():
                    made = here()
            except (DeviceOutOfMemory, DeviceFailure) as error:
                failed = _named(error, 0)
            answers = [self._answer(link) for link in self._links]
        failures = [failed, *map(_failure, self._links, answers)]
        if first := next(filter(None, failures), None):
            self._lost = self._lost or isinstance(first, DeviceFailure)
            raise first
        return made, answers

    def _answer(self, link: Link) -> Answer:
        answer = link.receive(self._patience)
        if answer is None:
            raise link.silent(self._patience)
        if not isinstance(answer, Answer):
            raise link.unexpected(answer)
        return answer

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        """What fails within leaves ranks that do not listen: in a collective, or ended."""
        try:
            yield
        except BaseException:
            self._lost = True
            raise

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Of this rank's part of a joint step, in which the others may wait for it for ever."""
        with self._or_lost():
            try:
                yield
            except DeviceOutOfMemory as error:
                raise StepFailed(f"rank 0: {error}") from error
            except DeviceFailure as error:
                raise _named(error, 0) from error


class _Together:
    """A step of all ranks in flight."""

    def __init__(self, here: InFlight, ranks: Ranks) -> None:
        self._here = here
        self._ranks = ranks

    def wait(self) -> Results:
        with self._ranks._in_step():
            return self._here.wait()


class _ForwardTogether:
    """A step of all ranks up to what is sampled from."""

    def __init__(self, here: Forward, ranks: Ranks) -> None:
        self._here = here
        self._ranks = ranks

    def sample(self, constraints: Constraints) -> InFlight:
        """Raises as Ranks.launch does."""
        ranks = self._ranks
        with ranks._in_step():
            ranks._send(Sample(ranks._steps.constrain(constraints)))
            return _Together(self._here.sample(constraints), ranks)


class _EncoderTogether:
    """Of all ranks. To begin waits for all: then each has copied the pixels that it encodes, and
    knows whether they are right. The rest is part of a joint step."""

    def __init__(self, here: Encoder, ranks: Ranks) -> None:
        self._here = here
        self._ranks = ranks

    def begin(self, images: Sequence[Image], rows: NDArray[np.int64]) -> list[int]:
        """Raises as the calls of Ranks do."""
        message = Encode([_encoded(image) for image in images], rows.tobytes())
        wrong, answers = self._ranks._each(message, lambda: self._here.begin(images, rows))
        return sorted(chain(wrong, *(answer.numbers for answer in answers)))

    def run(self, layers: int) -> bool:
        """Raises as Ranks.launch does."""
        with self._ranks._in_step():
            self._ranks._send(EncodeLayers(layers))
            return self._here.run(layers)


def _encoded(image: Image) -> EncodedImage:
    height, width, _ = image.pixels.shape
    assert image.place is not None, "pixels that other ranks cannot read"
    where = image.place.process, image.place.offset
    return EncodedImage(image.tokens, image.digest, *where, height, width)


def _named(
    error: DeviceOutOfMemory | DeviceFailure, rank: int
) -> DeviceOutOfMemory | DeviceFailure:
    if isinstance(error, DeviceOutOfMemory):
        return DeviceOutOfMemory(f"rank {rank}: {error}", rank)
    return DeviceFailure(f"rank {rank}: {error}")


def _failure(link: Link, answer: Answer) -> DeviceOutOfMemory | DeviceFailure | None:
    if not answer.failed:
        return None
    kind = DeviceOutOfMemory if answer.failed == "memory" else DeviceFailure
    return _named(kind(answer.text), link.rank)
