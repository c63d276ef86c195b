"""Slots of recurrent states: none is lost, none is written that another needs, and what a step
reads is the state of its sequence's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from played_states import NAN, Device, Part, Played

from kvline_server.engine.request import Sequence
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.device import cpu_device
from kvline_server.memory.pages import PAGE_SIZE, extend_chain
from kvline_server.memory.snapshots import Idle, Snapshot
from kvline_server.memory.state_arena import StateArena
from kvline_server.memory.state_shape import StateShape
from kvline_server.memory.states import DUMMY_SLOT, StatePool, StateTable


def asked(id: int, parts: list[tuple[int, int]], output: int) -> Sequence:
    """Of a prompt whose parts are so many tokens of a kind."""
    tokens = [kind for kind, count in parts for _ in range(count)]
    return Sequence(id, tokens, len(tokens), SamplingParams(max_tokens=output))


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(keys, tokens, len(tokens))
    return keys


class Hybrids(RuleBasedStateMachine):
    """Staggered ends, clients that leave, failures, preemptions, refusals for want of pages, and
    prompts that are cancelled between two chunks."""

    @initialize(
        running=st.integers(1, 5),
        snapshots=st.integers(0, 6),
        pages=st.integers(22, 60),
        rows=st.integers(0, 200),
        depth=st.integers(0, 1),
        drafts=st.integers(0, 9),
    )
    def begin(
        self, running: int, snapshots: int, pages: int, rows: int, depth: int, drafts: int
    ) -> None:
        self.played = Played(running, snapshots, pages, rows, depth, drafts)
        self.added: list[Sequence] = []

    @rule(
        parts=st.lists(
            st.tuples(st.integers(100, 102), st.sampled_from([1, 16, 30, 64, 65, 70])),
            min_size=1,
            max_size=3,
        ),
        output=st.integers(1, 100),
    )
    def add(self, parts: list[tuple[int, int]], output: int) -> None:
        self.added.append(asked(len(self.added), parts, output))
        self.played.scheduler.add(self.added[-1])

    @rule(at=st.integers(0, 30))
    def go_on(self, at: int) -> None:
        """A conversation's next turn."""
        if ended := self.played.ended:
            before = ended[at % len(ended)].tokens[:240]
            turn = [*before, *[103 + at % 3] * 20]
            self.added.append(Sequence(len(self.added), turn, len(turn), SamplingParams(30)))
            self.played.scheduler.add(self.added[-1])

    @rule(count=st.integers(1, 70))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.played.scheduler.idle:
                break
            self.played.step()

    @property
    def live(self) -> list[Sequence]:
        return [each for each in self.added if not each.ended]

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 100))
    def leave(self, at: int) -> None:
        self.played.leave(self.live[at % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 100))
    def break_one(self, at: int) -> None:
        self.played.broken.add(self.live[at % len(self.live)])

    @rule()
    def preempt(self) -> None:
        self.played.preempt()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "played"):
            pool = self.played.states
            assert pool.free + pool.used + pool.cached == pool.total

    def teardown(self) -> None:
        if not hasattr(self, "played"):
            return
        for _ in range(3000):
            if self.played.scheduler.idle:
                break
            waits = bool(self.played.in_flight)
            assert self.played.step() or waits, "there is work, but none was scheduled"
        assert not self.live and self.played.states.used == 0
        slots = self.played.device.slots
        assert NAN not in [slots[each.slot] for each in self.played.states._of.values()]


Hybrids.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestHybrids = Hybrids.TestCase


@dataclass(eq=False)
class Running:
    tokens: list[int]
    keys: list[bytes]
    computed: int
    table: StateTable
    broken: bool = False
    confirmed: int = 0


class Slots(RuleBasedStateMachine):
    """The pool by itself: sequences that are admitted and sit steps out, any chunks, and results
    that are read late or never."""

    @initialize(running=st.integers(1, 4), snapshots=st.integers(0, 4))
    def begin(self, running: int, snapshots: int) -> None:
        self.pool = StatePool(running, snapshots)
        self.device = Device(self.pool.total)
        self.running: list[Running] = []

    @rule(
        shared=st.sampled_from([64, 128, 200]),
        own=st.sampled_from([1, 64]),
        beyond=st.integers(0, 20),
    )
    def admit(self, shared: int, own: int, beyond: int) -> None:
        """`beyond` more pages are found than its state reaches, at most."""
        if len(self.running) == self.pool.running:
            return
        tokens = [9] * shared + [own] * own
        keys = keys_of(tokens)
        found = keys[: (len(tokens) - 1) // PAGE_SIZE]
        reach = self.pool.reach(found)
        matched = min(len(found), reach + beyond)
        table = self.pool.admit(keys, matched, reach, len(tokens))
        self.running.append(Running(tokens, keys, reach * PAGE_SIZE, table))

    @rule(rows=st.lists(st.sampled_from([0, 1, 24, 63, 64, 100, 128, 192]), min_size=4, max_size=4))
    def step(self, rows: list[int]) -> None:
        parts, steps, work = [], [], []
        for each, count in zip(self.running, rows, strict=False):
            if count:
                while len(each.tokens) < each.computed + count:  # decodes, of many tokens at once
                    each.tokens.append(len(each.tokens) % 3)
                extend_chain(each.keys, each.tokens, len(each.tokens))
                steps.append(self.pool.plan(each.table, each.computed, count, each.keys))
                parts.append(Part(each.tokens, each.computed, count, each.broken))
                work.append((each, count))
        finite = self.device.run(parts, steps)
        self.pool.check([each.table for each in self.running])
        self.pool.publish()
        for (each, count), good in zip(work, finite, strict=True):
            each.computed += count
            each.broken |= not good

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3))
    def read(self, at: int) -> None:
        """All results of one."""
        one = self.running[at % len(self.running)]
        if one.broken:
            self.pool.retract(one.keys)
            self.end(at, True)
        elif one.table.begun:
            one.confirmed = one.computed
            self.pool.confirm(one.table, one.computed)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), leaves=st.booleans())
    def end(self, at: int, leaves: bool) -> None:
        one = self.running.pop(at % len(self.running))
        self.pool.release(one.table, one.computed, one.confirmed, one.keys)
        if leaves:
            self.pool.abandon(one.keys)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 3), own=st.booleans())
    def fail(self, at: int, own: bool) -> None:
        """It, or another of its prefix that has left by now."""
        one = self.running[at % len(self.running)]
        if own:
            one.broken = True
        else:
            self.pool.retract(one.keys)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check([each.table for each in self.running])
            self.device.check(self.pool)


Slots.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestSlots = Slots.TestCase


def play(played: Played, *sequences: Sequence) -> None:
    """One after the other, each to its end."""
    for each in sequences:
        played.scheduler.add(each)
        while not each.ended:
            played.step()


def chat(id: int, *turns: tuple[int, int], output: int = 1) -> Sequence:
    return asked(id, list(turns), output)


@pytest.mark.parametrize(("length", "found"), [(63, 0), (64, 0), (65, 64), (128, 64), (200, 192)])
def test_an_equal_prompt_goes_on_from_the_last_boundary(length: int, found: int) -> None:
    played = Played(2, 2, 100, 512)
    first, second = chat(0, (9, length)), chat(1, (9, length))
    play(played, first, second)
    assert (first.cached, second.cached) == (0, found)


@pytest.mark.parametrize("output", [1, 56, 57, 58, 120, 121, 122, 200])
def test_a_conversation_goes_on_from_the_last_boundary_of_its_answer(output: int) -> None:
    """No copy is made while it decodes: it goes on in another slot."""
    played = Played(1, 1, 100, 512)
    first = chat(0, (9, 200), output=output)
    played.scheduler.add(first)
    copies = 0
    while not first.ended:
        played.step()
        copies += sum(len(each.snapshots) for each in played.steps)
        if not first.ended:
            assert played.states.cached <= 1, "of an answer it keeps the last one"
    assert copies == 1
    computed = 200 + output - 1  # the last token is not
    following = asked(1, [(each, 1) for each in [*first.tokens, *[8] * 80]], 1)
    play(played, following)
    assert following.cached == computed // 64 * 64


def test_where_prompts_branch_the_third_goes_on_from_there() -> None:
    """The second shows where: its pages are found, its state is not."""
    played = Played(1, 4, 100, 512)
    branches = [chat(id, (9, 150), (id, 100)) for id in range(3)]
    play(played, *branches)
    assert [each.cached for each in branches] == [0, 0, 128]
    assert (played.states.hit, played.states.lost) == (128, 128)


def test_what_a_conversation_has_passed_is_evicted_before_what_others_share() -> None:
    """Three slots: the system prompt's stays while one chat's turns come and go."""
    played = Played(1, 3, 400, 4096)
    play(played, *(chat(id, (9, 150), (id, 100)) for id in range(2)))
    history = [(9, 150), (1, 100)]
    for id in range(10, 16):
        history += [(id, 70)]
        turn = chat(id, *history)
        play(played, turn)
        assert turn.cached > 150
    late = chat(99, (9, 150), (99, 100))
    play(played, late)
    assert late.cached == 128


def test_the_snapshot_that_saves_least_is_evicted_first() -> None:
    idle = Idle()
    of = {name: Snapshot(name.encode(), 0, 100) for name in ("old", "passed", "read", "last")}
    of["large"] = Snapshot(b"large", 0, 900)
    of["passed"].passed, of["read"].saves, of["read"].reads = True, 200, 2
    for name in ("old", "large", "read", "passed", "last"):
        idle.add(of[name])
    for _ in range(20):
        idle.add(of["last"])
    idle.rate(of["large"])
    idle.rate(of["read"])
    idle.check()
    assert [idle.pop().key for _ in range(5)] == [b"passed", b"old", b"last", b"read", b"large"]


def test_a_snapshot_saves_what_lies_behind_the_last_one_that_others_share() -> None:
    """That of an answer counts once it has ended."""
    played = Played(1, 5, 400, 4096)
    play(played, *(chat(id, (9, 150), (id, 100)) for id in range(2)))
    answer = chat(2, (9, 150), (2, 100), output=30)
    played.scheduler.add(answer)
    while answer.computed < 270:
        played.step()
    left = max(played.states._idle, key=lambda each: each.used)
    assert (left.saves, left.worth - left.used) == (128, 0)
    while not answer.ended:
        played.step()
    assert left.saves == 128 and left.worth > left.used


def test_an_answer_s_snapshot_that_another_reads_is_not_written_in_the_same_step() -> None:
    keys = keys_of([9] * 240)
    pool = StatePool(2, 2)
    first = pool.admit(keys, 0, 0, 70)
    for start, rows in ((0, 70), (70, 58), (128, 1), (129, 63)):
        pool.plan(first, start, rows, keys)
        pool.publish()
    second = pool.admit(keys, 8, 8, 190)
    source = pool.plan(second, 128, 62, keys).source
    assert pool.plan(first, 192, 1, keys).slot != source != DUMMY_SLOT
    pool.check([first, second])


def test_idle_slots_hold_snapshots_and_an_admission_takes_them() -> None:
    played = Played(8, 1, 400, 4096)
    prompts = [chat(id, (id, 70)) for id in range(9)]
    play(played, *prompts)
    assert played.states.cached == 8, "one slot was the last one's own"
    for id in range(8):
        played.scheduler.add(chat(20 + id, (20 + id, 30), output=5))
    played.step()
    assert (played.states.used, played.states.cached) == (8, 1)
    assert played.states.reach(prompts[8].chain) == 4, "the one that was used last stays"


def test_a_sequence_has_a_slot_whatever_is_held() -> None:
    """All that may run go on from snapshots in one step, more than are kept for sure: the last ones
    go on in the snapshot's own slot."""
    played = Played(4, 1, 400, 4096)
    play(played, *(chat(id, (id, 70)) for id in range(4)))
    again = [chat(10 + id, (id, 70)) for id in range(4)]
    for each in again:
        played.scheduler.add(each)
    played.step()
    assert [each.cached for each in again] == [64] * 4
    assert played.states.cached == 1


def test_sequences_that_share_a_held_snapshot_have_slots_of_their_own() -> None:
    played = Played(3, 1, 400, 4096)
    play(played, chat(0, (9, 70)))
    again = [chat(1 + id, (9, 70), output=3) for id in range(3)]
    for each in again:
        played.scheduler.add(each)
    played.step()
    assert [each.cached for each in again] == [64] * 3
    assert (played.states.used, played.states.reach(again[0].chain)) == (3, 4)


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_snapshot_stays_once_a_result_of_any_that_reads_it_was_finite(confirmed: bool) -> None:
    keys = keys_of([9] * 140)
    pool = StatePool(2, 2)
    first = pool.admit(keys, 0, 0, 70)
    pool.plan(first, 0, 70, keys)
    pool.publish()
    pool.confirm(first, 63)  # of less than what the snapshot stands for
    second = pool.admit(keys, 4, 4, 140)
    pool.release(first, 70, 63, keys)
    pool.abandon(keys)
    assert pool.reach(keys) == 4, "another holds it"
    pool.plan(second, 64, 70, keys)
    pool.publish()
    if confirmed:
        pool.confirm(second, 127)
    pool.release(second, 134, 0, keys)
    pool.abandon(keys)
    assert pool.reach(keys) == (4 if confirmed else 0)


@pytest.mark.parametrize("retracted", [False, True])
def test_a_sequence_that_leaves_before_its_first_step_leaves_nothing(retracted: bool) -> None:
    """Its slot holds no state yet, and the snapshot that it held is as it was."""
    keys = keys_of([9] * 70)
    pool = StatePool(1, 1)
    table = pool.admit(keys, 0, 0, 70)
    pool.plan(table, 0, 70, keys)
    pool.publish()
    pool.release(table, 70, 70, keys)
    table = pool.admit(keys, 4, 4, 70)
    if retracted:
        pool.retract(keys)
    pool.release(table, 64, 0, keys)
    assert pool.reach(keys) == (0 if retracted else 4)
    assert (pool.used, pool.cached) == (0, 0 if retracted else 1)
    pool.check([])


def test_a_preempted_sequence_resumes_from_its_longest_snapshot() -> None:
    played = Played(1, 2, 100, 128)
    long = chat(0, (9, 400), output=100)
    played.scheduler.add(long)
    played.step()
    played.preempt()
    assert played.step()[0].start == 128, "half a prompt"
    while len(long.tokens) < 460:
        played.step()
    played.preempt()
    assert played.step()[0].start == 448, "half an answer"


def test_what_was_not_finite_is_not_found_and_what_was_confirmed_stays() -> None:
    played = Played(1, 4, 100, 128)
    good = chat(0, (9, 200), output=2)
    play(played, good)
    bad = asked(1, [(9, 200), (8, 200)], 50)
    played.broken.add(bad)
    play(played, bad)
    assert bad.cached == 192 and played.states.reach(good.chain) == 0, "any of it may be why"
    play(played, good := chat(2, (9, 200), output=2), chat(3, (9, 200), (8, 200)))
    left = chat(4, (9, 200), (7, 400), output=2)
    played.scheduler.add(left)
    played.step()
    assert left.computed == 192 + 128
    played.leave(left)
    assert played.states.reach(left.chain) == 12, "half a prompt that nobody waits for is not kept"


def test_no_pool_is_without_a_slot() -> None:
    for running, snapshots in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="slots for"):
            StatePool(running, snapshots)


SHAPES = [StateShape((3, 10), (2, 4, 8)), StateShape((3, 6), (1, 16, 5))]


def arena(slots: int) -> StateArena:
    return StateArena(SHAPES, slots, torch.bfloat16, torch.float32, torch.device("cpu"))


def test_slots_of_all_layers_are_one_allocation_of_zeros() -> None:
    made = arena(7)
    first, second = made.layers()
    assert first.inputs.shape == (7, 3, 10) and first.inputs.dtype == torch.bfloat16
    assert second.matrices.shape == (7, 1, 16, 5) and second.matrices.dtype == torch.float32
    parts = [part for layer in made.layers() for part in (layer.inputs, layer.matrices)]
    assert all(part.is_contiguous() and not part.any() for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [float(part.float().mean()) for part in parts] == [0, 1, 2, 3], "parts overlap"
    exact = 7 * sum(s.nbytes(torch.bfloat16, torch.float32) for s in SHAPES)
    assert exact <= made.nbytes < exact + 4 * 256


def test_a_host_s_memory_is_resident_when_it_is_reserved() -> None:
    device = cpu_device(None, 1)
    before = device.now()
    made = arena(100_000)
    assert device.now() - before > 0.95 * made.nbytes


def test_slots_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(DeviceOutOfMemory, match="slots of recurrent states"):
        arena(1 << 42)


def test_no_sequence_runs_without_rows() -> None:
    """A step's last rows are too few for a chunk: who would get none waits, and holds no slot."""
    played = Played(16, 2, 150, 200)
    for id in range(40):
        played.scheduler.add(chat(id, (id, 300), output=20))
    while not played.scheduler.idle:
        played.step()
        assert all(each.computed for each in played.scheduler.running)
    assert len(played.ended) == 40 and played.scheduler.preemptions < 10


def test_a_prompt_with_penalties_takes_turns_with_others_decodes() -> None:
    """Both have penalties of more tokens than fit into a step. The prompt's last row waits for its
    turn alone, behind all others, whatever a chunk of them is."""
    played = Played(2, 4, 130, 512)
    params = SamplingParams(max_tokens=300, repetition_penalty=1.2)
    shared = [9] * 1600
    first, second = (Sequence(id, [*shared, *[id] * 40], 1640, params) for id in range(2))
    played.scheduler.add(first)
    for _ in range(10):
        played.step()
    assert len(first.tokens) > 1640
    played.scheduler.add(second)
    for _ in range(30):
        played.step()
    assert len(second.tokens) > 1640 and not first.ended


def test_an_answer_s_snapshot_that_others_went_on_from_counts_as_theirs() -> None:
    played = Played(2, 6, 200, 512)
    answering = chat(0, (9, 70), output=200)
    played.scheduler.add(answering)
    while len(answering.tokens) < 140:
        played.step()
    branch = asked(1, [(each, 1) for each in [*answering.tokens[:130], *[8] * 80]], 1)
    played.scheduler.add(branch)
    while len(answering.tokens) < 200:
        played.step()
    assert branch.ended and branch.cached == 128
    running = [each for each in played.states._of.values() if each.decoding]
    assert len(running) == 1, "the one that it left last"


def test_drafts_go_on_from_the_last_accepted_row() -> None:
    """Over boundaries, with slots for fewer drafts than sequences want, and none is lost."""
    played = Played(3, 4, 200, 512, drafts=4)
    for id in range(6):
        played.scheduler.add(chat(id, (9, 50 + id), output=150))
    while not played.scheduler.idle:
        played.step()
    right, wrong = played.accepted
    assert right > 2 * wrong > 100 and played.states.drafts == 4


@pytest.mark.parametrize("leave", [True, False])
def test_slots_of_drafts_that_nobody_read_come_back(leave: bool) -> None:
    """Of who leaves, or is preempted, with a step in flight; its state is kept for nobody."""
    played = Played(1, 2, 100, 512, depth=1, drafts=4)
    own = chat(0, (9, 50), output=150)
    played.scheduler.add(own)
    table = None
    while table is None or table.drafted is None:
        played.step()
        table = own.table.states
    assert played.states.drafts < 4
    if leave:
        played.leave(own)
    else:
        played.preempt()
    assert played.states.drafts == 4 and not played.states.used
