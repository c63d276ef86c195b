"""Every call of several ranks ends on all of them, in the same state, and in bounded time; so does
one that fails on any of them."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from test_wire import flat, small
from waiting import limit, within

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory, RankLost, StepFailed
from kvline_server.ipc.messages import RankLoaded
from kvline_server.ipc.pixels import PAGE, Place, create, shared_pixels
from kvline_server.kernels.group import Group
from kvline_server.kernels.tuning import Choices
from kvline_server.parallel.executor import Local, Usage
from kvline_server.parallel.follow import Follower
from kvline_server.parallel.join import follow, join
from kvline_server.parallel.link import Link
from kvline_server.parallel.ranks import Ranks
from kvline_server.parallel.wire import Steps
from kvline_server.worker.encoder import Given, Image
from kvline_server.worker.step import Constraints, InFlight, LogitsEdits, Step, TokenMasks

SECONDS = limit(5)  # far more than any call of these takes
CHOICES: Choices = {(1, 2, 3): 4, (8, 2, 3): 5}


class FakeGroup:
    """Notes who is apart from the others."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.sent, self.is_apart = rank, ranks, 0, False

    @contextmanager
    def apart(self) -> Iterator[None]:
        self.is_apart = True
        try:
            yield
        finally:
            self.is_apart = False


@dataclass
class FakeLocal:
    """A Local that runs nothing. `breaks` maps the name of a call to what it does instead."""

    rank: int
    ranks: int
    breaks: dict[str, Callable[[], None]] = field(default_factory=dict)
    group: Any = None
    pages: tuple[int, ...] = (0,)
    mapped: tuple[int, ...] = (0,)
    holding: int = 0
    depth: int = 1
    limit: int = 1000
    choices: Choices | None = None
    knows: bool = True  # the peaks of its steps
    constraints: list[Any] = field(default_factory=list)  # of steps that got them late
    ran: list[str] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)  # passes of images

    def __post_init__(self) -> None:
        self.encoder = self
        self.group = self.group or FakeGroup(self.rank, self.ranks)
        self.worker = self
        self.loaded = RankLoaded(
            pid=1000 + self.rank,
            limit=self.limit,
            free_before=self.rank,
            collectives=-self.rank,
            encoder=self.rank,
            pace=9 - self.rank,
            device="a device",
            kernels="Kernels",
            fingerprint="f",
        )

    def _do(self, name: str) -> None:
        together = name in ("launch", "forward", "sample", "run")
        assert self.group.is_apart is not together, name
        self.ran.append(name)
        if name in self.breaks:
            self.breaks[name]()

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        self._do("tune")
        self.choices = dict(CHOICES) if known is None else known
        return self.choices

    def warm_up(self, max_rows: int) -> int:
        self._do("warm_up")
        return max_rows

    def capture(self, max_rows: int, longest: int) -> bool:
        self._do("capture")
        return True

    def launch(self, step: Step, read: bool = True) -> FakeLocal:
        self._do("launch")
        assert step.tokens.tolist() == [1] and read is (self.rank == 0)
        return self

    def forward(self, step: Step) -> FakeLocal:
        self._do("forward")
        assert step.tokens.tolist() == [1]
        return self

    def sample(self, constraints: Constraints, read: bool = True) -> FakeLocal:
        self._do("sample")
        self.constraints.append(flat(constraints))
        assert read is (self.rank == 0)
        return self

    def begin(self, images: Sequence[Image], rows: np.ndarray) -> list[int]:
        self._do("begin")
        each = [(image.tokens, image.digest, image.pixels.tolist()) for image in images]
        self.begun.append([*each, rows.tolist()])
        return [at for at, image in enumerate(images) if image.tokens == 7 + self.rank]

    def run(self, layers: int) -> bool:
        self._do("run")
        return layers == 0

    def wait(self) -> None:
        if "wait" in self.breaks:
            self.breaks["wait"]()

    def rehearse(self, step: Step) -> None:
        self._do("rehearse")

    def resize(self, pages: tuple[int, ...]) -> None:
        self.mapped = max(self.mapped, self.pages, pages)  # as far as it comes
        self._do("resize") if pages > self.pages else None
        self.pages = self.mapped = pages

    def usage(self) -> tuple[Usage, ...]:
        self._do("usage")
        return (Usage(self.limit, 1, 2, 3, self.pages[0], self.rank),)

    def settle(self) -> None:
        self._do("settle")

    def reset_peak(self) -> None:
        self._do("reset_peak")

    def keep_peak(self, again: bool) -> bool:
        self._do("keep_peak")
        return self.knows

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        self._do("held")
        self.holding += nbytes
        try:
            yield
        finally:
            self.holding -= nbytes


class Pod:
    """Ranks as threads."""

    def __init__(self, ranks: int, **options: Any) -> None:
        self.file = os.memfd_create("steps")
        self.pixels = [create(16 * PAGE) for _ in range(2)]
        for file, n in itertools.product(self.pixels, range(16)):
            os.pwrite(file, (PIXELS + n).tobytes(), n * PAGE)
        self.locals = [FakeLocal(rank, ranks, **options) for rank in range(ranks)]
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        self.ends = [end for _, end in pairs]
        self.ours = [end for end, _ in pairs]
        self.links = [Link(end, rank) for rank, (end, _) in enumerate(pairs, 1)]
        self.failed: dict[int, BaseException] = {}
        self.threads = [
            threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, ranks)
        ]
        for thread in self.threads:
            thread.start()

    def ranks(self, patience: float = SECONDS) -> Ranks:
        first = self.locals[0]
        where = cast(Local, first), cast(Group, first.group), self.links, self.steps()
        return join(*where, first.loaded, patience=patience).executor

    def steps(self) -> Steps:
        return Steps(self.file, 4096, 2, len(self.ends))

    def _follow(self, rank: int) -> None:
        local, end = self.locals[rank], self.ends[rank - 1]
        try:
            where = cast(Local, local), cast(Group, local.group), Link(end, 0), self.steps()
            follow(*where, local.loaded, shared_pixels(self.pixels)).serve()
        except BaseException as error:
            self.failed[rank] = error
        finally:
            end.close()

    def end(self) -> None:
        for end in self.ours:
            end.close()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank outlives rank 0"
        for file in (self.file, *self.pixels):
            os.close(file)


@pytest.fixture(params=[2, 3, 4])
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    made = Pod(request.param)
    yield made
    made.end()


ROWS = np.arange(5)
MASKS = TokenMasks(ROWS, np.arange(50, dtype=np.int32))
ONES = np.ones(5, np.float32)
CONSTRAINTS = Constraints((LogitsEdits(ROWS, ROWS + 7, 2 * ONES, ONES),), MASKS)
WHEN = ["launch", "forward", "sample", "wait", "run"]
PIXELS = np.zeros((1, 2, 3), np.uint8)

CALLS: dict[str, Callable[[Ranks], object]] = {
    "tune": lambda ranks: ranks.tune(8, None),
    "warm_up": lambda ranks: ranks.warm_up(8),
    "capture": lambda ranks: ranks.capture(8, 16),
    "rehearse": lambda ranks: ranks.rehearse(small()),
    "resize": lambda ranks: ranks.resize((9,)),
    "usage": lambda ranks: ranks.usage(),
    "settle": lambda ranks: ranks.settle(),
    "reset_peak": lambda ranks: ranks.reset_peak(),
    "keep_peak": lambda ranks: ranks.keep_peak(True),
    "held": lambda ranks: hold(ranks),
    "begin": lambda ranks: encode(ranks, 3),
}


def encode(ranks: Ranks, *tokens: int) -> list[int]:
    """Begins a pass of images of so many tokens."""
    encoder = ranks.encoder
    assert encoder is not None
    given = [Given(n, bytes([n]), PIXELS + n, Place(n % 2, n * PAGE)) for n in tokens]
    return encoder.begin(given, np.arange(sum(tokens), dtype=np.int64))


def hold(ranks: Ranks) -> None:
    with ranks.held(7):
        pass


def launched(ranks: Ranks, when: str) -> InFlight:
    """A step that does something in this call: at once, or in two parts; or behind images."""
    if when == "run":
        assert ranks.encoder is not None and ranks.encoder.run(0)
    if when in ("launch", "wait", "run"):
        return ranks.launch(small())
    return ranks.forward(small()).sample(CONSTRAINTS)


def out_of_memory() -> None:
    torch.empty(1 << 62, dtype=torch.uint8)


def fault() -> None:
    raise DeviceFailure("a bus error")


def bug() -> None:
    raise ZeroDivisionError


def test_every_call_runs_on_every_rank(pod: Pod) -> None:
    ranks = pod.ranks()
    assert ranks.ranks == len(pod.locals)
    for call in CALLS.values():
        call(ranks)
    for local in pod.locals:
        assert local.ran == list(CALLS)
        assert (local.choices, local.pages, local.holding) == (CHOICES, (9,), 0)
    assert [usage.files for usage in ranks.usage()] == [local.rank for local in pod.locals]


def test_images_go_to_every_rank_and_each_says_which_are_wrong(pod: Pod) -> None:
    """By the memory of either HTTP process. Rank 0 hears of all before anything else is asked."""
    ranks = pod.ranks()
    assert encode(ranks, 3, 1) == []
    assert encode(ranks, 3, 8, 1, 7) == [1, 3]
    for local in pod.locals:
        for begun, tokens in zip(local.begun, ([3, 1], [3, 8, 1, 7]), strict=True):
            *images, rows = begun
            assert rows == list(range(sum(tokens)))
            assert images == [(n, bytes([n]), (PIXELS + n).tolist()) for n in tokens]


def test_steps_run_on_every_rank_as_fast_as_all_of_them_are(pod: Pod) -> None:
    ranks = pod.ranks()
    pod.locals[-1].breaks["launch"] = lambda: time.sleep(0.002)
    for _ in range(50):
        ranks.launch(small()).wait()
    ranks.settle()  # which comes after all of them
    assert [local.ran.count("launch") for local in pod.locals] == [50] * ranks.ranks


def test_the_constraints_of_a_step_follow_it_to_every_rank(pod: Pod) -> None:
    """Between others, as fast as the slowest rank reads them from one buffer or the other."""
    ranks = pod.ranks()
    pod.locals[-1].breaks["sample"] = lambda: time.sleep(0.002)
    wanted = []
    for number in range(60):
        if number % 4 == 1:
            ranks.launch(small()).wait()
        else:
            own = Constraints(CONSTRAINTS.logits_edits, TokenMasks(ROWS, MASKS.words + number))
            ranks.forward(small()).sample(own).wait()
            wanted.append(flat(own))
    ranks.settle()  # which comes after all of them
    for local in pod.locals:
        assert local.constraints == wanted
        assert [local.ran.count(name) for name in WHEN[:3]] == [15, 45, 45]


def test_steps_keep_no_memory_once_ranks_have_settled(pod: Pod) -> None:
    ranks = pod.ranks()
    for _ in range(9):
        ranks.launch(small())
    before = os.fstat(pod.file).st_blocks
    ranks.settle()
    assert os.fstat(pod.file).st_blocks < before
    ranks.launch(small()).wait()
    ranks.settle()
    assert [local.ran.count("launch") for local in pod.locals] == [10] * ranks.ranks


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", [0, 1, -1])
def test_memory_that_one_rank_lacks_is_an_error_of_all(pod: Pod, name: str, where: int) -> None:
    ranks, local = pod.ranks(), pod.locals[where]
    ranks.resize((4,))
    local.breaks[name] = out_of_memory
    with pytest.raises(DeviceOutOfMemory, match=f"^rank {local.rank}: ") as error:
        CALLS[name](ranks)
    assert error.value.rank == local.rank
    assert {each.pages for each in pod.locals} == {each.mapped for each in pod.locals} == {(4,)}
    assert {each.holding for each in pod.locals} == {0}
    del local.breaks[name]
    for call in CALLS.values():  # all goes on
        call(ranks)
    assert {each.pages for each in pod.locals} == {(9,)}


def test_two_ranks_without_memory_are_one_error(pod: Pod) -> None:
    ranks = pod.ranks()
    for local in pod.locals:
        local.breaks["rehearse"] = out_of_memory
    with pytest.raises(DeviceOutOfMemory, match=r"^rank 0: "):
        ranks.rehearse(small())
    assert len(ranks.usage()) == ranks.ranks


def test_what_is_held_is_released_everywhere_when_the_work_beside_it_fails(pod: Pod) -> None:
    ranks = pod.ranks()
    pod.locals[1].breaks["rehearse"] = out_of_memory
    with pytest.raises(DeviceOutOfMemory), ranks.held(7):
        assert {each.holding for each in pod.locals} == {7}
        ranks.rehearse(small())
    assert {each.holding for each in pod.locals} == {0}


def test_a_peak_is_known_where_every_rank_knows_its_own(pod: Pod) -> None:
    ranks = pod.ranks()
    assert ranks.keep_peak(True)
    pod.locals[-1].knows = False
    assert not ranks.keep_peak(True)
    pod.locals[-1].knows, pod.locals[0].knows = True, False
    assert not ranks.keep_peak(False)


@pytest.mark.parametrize("name", CALLS)
def test_a_failed_device_is_named(pod: Pod, name: str) -> None:
    ranks = pod.ranks()
    pod.locals[-1].breaks[name] = fault
    with pytest.raises(DeviceFailure, match=f"rank {ranks.ranks - 1}: a bus error"):
        CALLS[name](ranks)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_ends_in_a_call_is_noticed_at_once(pod: Pod, name: str) -> None:
    ranks = pod.ranks()
    pod.locals[1].breaks[name] = bug
    with within(5), pytest.raises(RankLost, match="rank 1 has ended"):
        CALLS[name](ranks)
    assert isinstance(pod.failed[1], ZeroDivisionError)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_never_answers_is_given_up(pod: Pod, name: str) -> None:
    ranks, go_on = pod.ranks(patience=0.2), threading.Event()
    pod.locals[1].breaks[name] = lambda: cast(None, go_on.wait(SECONDS))
    with pytest.raises(RankLost, match=r"rank 1 has not answered for 0\.2 s"):
        CALLS[name](ranks)
    go_on.set()


def test_a_rank_that_ended_between_steps_is_noticed(pod: Pod) -> None:
    ranks = pod.ranks()
    pod.locals[1].breaks["launch"] = bug
    with pytest.raises(RankLost, match="rank 1 has ended"):
        for _ in range(9):
            ranks.launch(small()).wait()


def test_a_rank_that_runs_no_more_steps_is_given_up() -> None:
    pod, go_on = Pod(2), threading.Event()
    ranks = pod.ranks(patience=0.2)
    pod.locals[1].breaks["launch"] = lambda: cast(None, go_on.wait(SECONDS))
    with pytest.raises(RankLost, match=r"no steps for 0\.2 s"), ranks.held(7):
        for _ in range(9):
            ranks.launch(small()).wait()
    assert pod.locals[0].holding == 0
    go_on.set()
    pod.end()


@pytest.mark.parametrize("when", WHEN)
def test_memory_that_rank_0_lacks_in_a_joint_step_ends_all(pod: Pod, when: str) -> None:
    """The others wait for it in a collective: nobody answers any more, and nobody is asked."""
    ranks = pod.ranks()
    pod.locals[0].breaks[when] = out_of_memory_translated
    with pytest.raises(StepFailed, match=r"^rank 0: "), ranks.held(7):
        launched(ranks, when).wait()
    assert pod.locals[0].holding == 0


def out_of_memory_translated() -> None:
    raise DeviceOutOfMemory("launch: none")


@pytest.mark.parametrize("when", WHEN)
def test_memory_that_another_rank_lacks_in_a_joint_step_ends_it(pod: Pod, when: str) -> None:
    ranks = pod.ranks()
    pod.locals[1].breaks[when] = out_of_memory_translated
    # It may have ended before the second part of the step.
    with suppress(RankLost) if when in ("forward", "run") else nullcontext():
        launched(ranks, when)
    pod.threads[0].join(SECONDS)  # an error of an earlier step shows while it is idle
    assert isinstance(pod.failed[1], StepFailed)
    assert str(pod.failed[1]) == "rank 1: launch: none"
    with pytest.raises(RankLost):
        ranks.settle()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("what", ["fault", "bug"])
def test_what_fails_in_a_joint_step_of_rank_0_is_raised_at_once(
    pod: Pod, when: str, what: str
) -> None:
    """The others wait in a collective, and could not answer that they hold nothing any more."""
    ranks, go_on = pod.ranks(), threading.Event()
    for local in pod.locals[1:]:
        for name in ("launch", "forward", "run"):
            local.breaks[name] = lambda: cast(None, go_on.wait(3 * SECONDS))
    pod.locals[0].breaks[when] = {"fault": fault, "bug": bug}[what]
    expected = {"fault": DeviceFailure, "bug": ZeroDivisionError}[what]
    with within(5), pytest.raises(expected) as error, ranks.held(7):
        launched(ranks, when).wait()
    assert what == "bug" or str(error.value) == "rank 0: a bus error"
    assert pod.locals[0].holding == 0
    go_on.set()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("what", ["fault", "bug"])
def test_what_fails_in_a_joint_step_of_another_rank_ends_that_one(
    pod: Pod, when: str, what: str
) -> None:
    """Rank 0 waits in a collective until the connection breaks."""
    ranks = pod.ranks()
    pod.locals[1].breaks[when] = {"fault": fault, "bug": bug}[what]

    def broken_collective() -> None:
        pod.threads[0].join(SECONDS)
        raise RankLost("rank 0 waits for another, in vain")

    pod.locals[0].breaks["wait"] = broken_collective
    why = r"in vain|has ended" if when in ("forward", "run") else "in vain"
    with within(5), pytest.raises(RankLost, match=why), ranks.held(7):
        launched(ranks, when).wait()
    expected = {"fault": DeviceFailure, "bug": ZeroDivisionError}[what]
    assert isinstance(pod.failed[1], expected)
    assert pod.locals[0].holding == 0


def test_nobody_is_asked_any_more_after_a_device_has_failed(pod: Pod) -> None:
    ranks = pod.ranks()
    pod.locals[1].breaks["rehearse"] = fault
    with pytest.raises(DeviceFailure, match="rank 1: a bus error"), ranks.held(7):
        ranks.rehearse(small())
    assert pod.locals[0].holding == 0 and pod.locals[1].holding == 7


def test_a_bug_in_a_call_of_rank_0_is_raised_as_it_is(pod: Pod) -> None:
    ranks = pod.ranks()
    pod.locals[0].breaks["rehearse"] = bug
    with pytest.raises(ZeroDivisionError), ranks.held(7):
        ranks.rehearse(small())
    assert pod.locals[0].holding == 0


def test_a_rank_that_ended_before_a_step_is_noticed_at_once() -> None:
    pod = Pod(2)
    ranks = pod.ranks()
    pod.locals[1].breaks["launch"] = bug
    with within(5), pytest.raises(RankLost, match="rank 1 has ended"), ranks.held(7):
        ranks.launch(small()).wait()
        pod.threads[0].join(SECONDS)
        ranks.launch(small())
    assert pod.locals[0].holding == 0
    pod.end()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"limit": 3 << 20}, "rank 0 has a device with 3 MiB, rank 1 has a device with 0 MiB"),
        ({"device": "b"}, "must be equal: rank 0 has b with 0 MiB, rank 1 has a device with"),
        ({"kernels": "Others"}, "must be equal: rank 0 has Others, rank 1 has Kernels"),
        ({"fingerprint": "g"}, "rank 0 and rank 1 differ in the model's files, the settings"),
    ],
)
def test_ranks_that_differ_are_refused(other: dict[str, Any], text: str) -> None:
    pod = Pod(2)
    pod.locals[0].loaded = structs.replace(pod.locals[0].loaded, **other)
    with pytest.raises(DeviceFailure, match=re.escape(text)):
        pod.ranks()
    pod.end()


def test_ranks_report_what_was_free_and_what_exchange_and_images_take(pod: Pod) -> None:
    first = pod.locals[0]
    first.loaded = structs.replace(first.loaded, free_before=9)
    where = cast(Local, first), cast(Group, first.group), pod.links, pod.steps()
    joined = join(*where, first.loaded)
    assert joined.free_before == (9, *range(1, len(pod.locals)))
    assert joined.collectives == 0
    last = len(pod.locals) - 1  # takes the most for images, and is slowest
    assert (joined.encoder, joined.pace) == (last, 9 - last)


def test_kernels_that_differ_are_refused(pod: Pod) -> None:
    ranks, last = pod.ranks(), pod.locals[-1]
    last.tune = lambda max_rows, known: {}  # type: ignore[method-assign]
    with pytest.raises(DeviceFailure, match="not there on another rank"):
        ranks.tune(8, None)
    last.capture = lambda max_rows, longest: False  # type: ignore[method-assign]
    with pytest.raises(DeviceFailure, match="some of the ranks only"):
        ranks.capture(8, 16)


def test_a_follower_ends_with_rank_0() -> None:
    ours, theirs = socket.socketpair()
    steps = Steps(os.memfd_create("steps"), 4096, 2, 1)
    made = FakeLocal(1, 2)
    follower = Follower(cast(Local, made), cast(Group, made.group), Link(theirs, 0), steps)
    ours.close()
    follower.serve()
    theirs.close()
