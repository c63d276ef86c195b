"""The scheduler without a model: no starvation, no deadlock, nothing computed twice. F55."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import seven
from engines import play_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import PREFILL_PER_REQUEST, SHARED_TABLES, WAVE, Scheduler
from kvline_server.engine.work import Work
from kvline_server.ipc.sampling_params import SamplingParams, ThinkingBudget
from kvline_server.memory.caches import Caches
from kvline_server.memory.pages import PAGE_SIZE, pages_for


def sequence(id: int, length: int, output: int, base: int = 0, scored: bool = False) -> Sequence:
    params = SamplingParams(max_tokens=output, prompt_logprobs=1 if scored else None)
    return Sequence(id, [base + i for i in range(length)], length, params)


def step(scheduler: Scheduler, done: list[int], check: bool = True) -> list[Work]:
    """One step of a model that always outputs 7; sequences end at max_tokens."""
    work = scheduler.schedule()
    assert sum(w.rows for w in work) <= scheduler.max_step_tokens
    assert len(scheduler.running) <= scheduler.max_running
    for w in work:
        assert w.start == w.sequence.computed
        assert w.sequence.table.tokens >= w.start + w.rows
    seven.advance(scheduler, work, done)
    if check:
        scheduler.caches.check([each.table for each in scheduler.running])
    return work


shapes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=80)
@given(shapes, st.integers(7, 20), st.integers(1, 5), st.integers(8, 40))
@pytest.mark.fault(
    "F55",
    shows="random loads over few pages: every sequence ends and every page comes back",
)
def test_every_sequence_ends_whatever_the_pages(
    shapes: list[tuple[int, int, int]], pages: int, running: int, tokens: int
) -> None:
    """Any one fits alone (90 tokens, 6 pages), so all end, each once, and no page is kept."""
    scheduler = Scheduler(Caches((0,), (pages,), 64), running, max(tokens, running))
    for id, (prompt, output, base) in enumerate(shapes):
        scheduler.add(sequence(id, prompt, output, base))
    play_to_end(scheduler, len(shapes), partial(step, scheduler))


masked_shapes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.sampled_from(["", "grammar", "thinking"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(masked_shapes, st.integers(7, 20), st.integers(1, 5), st.integers(8, 40))
def test_a_sequence_with_masks_runs_ahead_as_others_do(
    shapes: list[tuple[int, int, str]], pages: int, running: int, tokens: int
) -> None:
    """With a step in flight: every one ends, no page is kept, and no step more is needed."""
    caches = [Caches((0,), (pages,), 64) for _ in range(2)]
    plain, masked = (Scheduler(each, running, max(tokens, running)) for each in caches)
    free = [(prompt, output, "") for prompt, output, _ in shapes]
    assert steps_ahead(masked, shapes) == steps_ahead(plain, free)


def steps_ahead(scheduler: Scheduler, shapes: list[tuple[int, int, str]]) -> int:
    """Until all have ended, with a step in flight."""
    budget = ThinkingBudget(5, 3)
    for id, (prompt, output, kind) in enumerate(shapes):
        masks = {"grammar": {"grammar": b"key"}, "thinking": {"thinking": budget}}.get(kind, {})
        params = SamplingParams(max_tokens=output, **masks)  # type: ignore[arg-type]
        scheduler.add(Sequence(id, list(range(prompt)), prompt, params))
    in_flight: list[Sequence] = []
    steps = 0

    def play(done: list[int]) -> bool:
        nonlocal in_flight, steps
        steps += 1
        work = scheduler.schedule()
        scheduler.advance(work)
        sampled = [w.sequence for w in work if w.start + w.rows == w.sequence.length]
        for each in sampled:
            each.pending += 1
        read, in_flight = in_flight, sampled
        for each in read:
            each.pending -= 1
            each.tokens.append(7)
            if len(each.tokens) >= each.limit:
                scheduler.remove(each)
                done.append(each.id)
        scheduler.caches.check([each.table for each in scheduler.running])
        return bool(work or read)

    play_to_end(scheduler, len(shapes), play)
    return steps


def test_a_large_step_fills_whole_waves_while_prompts_queue_and_delays_none() -> None:
    rng = random.Random(3)
    scheduler = Scheduler(Caches((0,), (8000,), 64), 60, 4 * WAVE)
    for id in range(400):
        scheduler.add(sequence(id, rng.randint(1, 700), rng.randint(1, 30), 1000 * id))
    done: list[int] = []
    large = whole = 0
    while not scheduler.idle:
        queued = len(scheduler.waiting)
        rows = sum(w.rows for w in step(scheduler, done))
        if queued and scheduler.waiting and rows >= WAVE:
            large += 1
            whole += rows % WAVE == 0
    assert sorted(done) == list(range(400))
    assert large > 20 and whole >= 0.9 * large
    alone = Scheduler(Caches((0,), (8000,), 64), 60, 4 * WAVE)
    alone.add(sequence(0, WAVE + 1, 1))
    assert step(alone, []) and alone.idle, "a prompt that nobody waits behind is not cut"


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ((900, 900, 300), (900, 900, 248)),
        ((1030, 1030, 10), (1030, 1018)),
        ((2040, 5, 5, 5), (2040, 5, 3)),
    ],
)
def test_what_a_large_step_cuts_from_prompts_runs_in_the_next(
    lengths: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    """Also all rows of one, whose time in the queue ends with its first. Each token is computed
    once."""
    scheduler = Scheduler(Caches((0,), (8000,), 64), len(lengths), 4 * WAVE)
    asked = [sequence(id, length, 3, 4000 * id) for id, length in enumerate((*lengths, 1, 1, 1))]
    for each in asked:
        scheduler.add(each)
    admitted, computed, done = asked[: len(lengths)], dict.fromkeys(asked, 0), list[int]()
    while not scheduler.idle:
        first = not computed[asked[0]]
        work = step(scheduler, done)
        if first:
            assert tuple(w.rows for w in work) == rows
            assert list(scheduler.running) == admitted and len(scheduler.waiting) == 3
        for w in work:
            assert w.start == computed[w.sequence]
            computed[w.sequence] += w.rows
        assert all((each.waited is None) == (not rows) for each, rows in computed.items())
        if not first:
            assert all(computed[each] >= each.prompt_length for each in admitted)
    assert sorted(done) == list(range(len(asked)))
    assert all(rows == each.prompt_length + 2 for each, rows in computed.items())


@pytest.mark.parametrize("running", [1, 2, 512, 1024, 1025, 1500, 4096])
def test_no_number_of_running_sequences_starves_a_prompt(running: int) -> None:
    """All but one of them decode without end, others queue, and a step fills whole waves: the one
    prompt still gets rows in each step, and comes to its first token."""
    most = max(running, 2048)
    scheduler = Scheduler(Caches((0,), (80_000,), 64), running, most, 512)
    for id in range(running - 1):
        scheduler.add(sequence(id, 2, 10**6, 10 * id))
    late = sequence(running, 200, 1, 10**6)
    while len(scheduler.running) < running - 1:
        step(scheduler, [])
    scheduler.add(late)
    scheduler.add(sequence(running + 1, 700, 1, 2 * 10**6))
    done: list[int] = []
    for _ in range(200 // (most - running + 1) + 3):  # as many rows a step as decodes leave
        before = late.computed
        step(scheduler, done, check=False)
        assert running + 1 in done or late.id in done or late.computed > before
        if late.id in done:
            break
    assert late.id in done


def twins(count: int, pages: int, output: int, penalty: float = 1.0) -> list[Sequence]:
    """Of one prompt of so many pages."""
    params = SamplingParams(max_tokens=output, repetition_penalty=penalty)
    length = pages * PAGE_SIZE
    return [Sequence(id, list(range(length)), length, params) for id in range(count)]


def test_penalties_of_sequences_that_share_a_prompt_take_turns() -> None:
    """A step changes the logits of all tokens of each sequence that has a repetition penalty: of
    500 that share a prompt of 100,000 tokens those would be gigabytes."""
    scheduler = Scheduler(Caches((0,), (101,), 64), 10, 512)
    first, *others = twins(10, 30, 20, penalty=1.1)
    scheduler.add(first)
    step(scheduler, [])
    for each in others:
        scheduler.add(each)
    done: list[int] = []
    before: list[int] = []
    for number in itertools.count():
        known = {each: each.length for each in (first, *others)}
        step(scheduler, done)
        sampled = [pages_for(length) for each, length in known.items() if each.length > length]
        assert sampled and sum(sampled) <= 100
        if scheduler.idle:
            break
        if len(scheduler.running) == 10 and number % 4 == 0:  # 3 of 10 have room in a step
            lengths = [each.length for each in scheduler.running]
            assert all(now > then for now, then in zip(lengths, before, strict=False))
            before = lengths
    assert sorted(done) == list(range(10))


def test_chats_that_sit_a_step_out_still_count_for_the_prompts_beside_them() -> None:
    """3 of 10 with a repetition penalty have room in a step; the others are in one soon."""
    scheduler = Scheduler(Caches((0,), (101,), 64), 11, 512, 32)
    first, *others = twins(10, 30, 100, penalty=1.1)
    for some in ([first], others):
        for each in some:
            scheduler.add(each)
        while any(each.computed < 30 * PAGE_SIZE for each in some):
            step(scheduler, [])
    scheduler.add(sequence(99, 300, 5, 10**6))
    *decodes, prompt = scheduler.schedule()
    assert len(decodes) == 3 and prompt.rows == 11 * PREFILL_PER_REQUEST


def test_all_page_tables_of_sequences_that_share_pages_have_a_bound() -> None:
    scheduler = Scheduler(Caches((0,), (101,), 64), 100, 512)
    first, *others = twins(100, 80, 3)
    scheduler.add(first)
    while first.computed < 80 * PAGE_SIZE:
        step(scheduler, [])
    for each in others:
        scheduler.add(each)
    done: list[int] = []
    most = 0
    while not scheduler.idle:
        step(scheduler, done)
        most = max(most, sum(each.table.pages for each in scheduler.running))
    assert 5 * 100 < most <= (1 + SHARED_TABLES) * 100
    assert sorted(done) == list(range(100))


@settings(max_examples=30)
@given(
    st.integers(1, 4096),
    st.lists(st.integers(2, 3000), min_size=1, max_size=6),
    st.sampled_from([64, 512, 2048, 8192]),
    st.integers(0, 3),
)
def test_the_oldest_prompt_always_advances(
    decoding: int, prompts: list[int], cap: int, queued: int
) -> None:
    """Whatever decodes, fills and queues: the oldest prompt gets rows, decodes lose none, and
    a mixed step has no more of prompts than its cap and the number of requests allow."""
    running = decoding + len(prompts)
    scheduler = Scheduler(Caches((0,), (60_000,), 64), running, max(running, 8192), cap)
    for id in range(decoding):
        scheduler.add(sequence(id, 1, 100, 10 * id))
    step(scheduler, [], check=False)
    for at, length in enumerate(prompts):
        scheduler.add(sequence(decoding + at, length, 100, 10**6 * (at + 1)))
    for at in range(queued):
        scheduler.add(sequence(running + at, 500, 1, 10**8 + at))
    oldest = scheduler.waiting[0]
    work = scheduler.schedule()
    assert sum(w.rows for w in work if w.sequence.id < decoding) == decoding
    assert [w.rows > 0 for w in work if w.sequence is oldest] == [True]
    allowed = max(cap, PREFILL_PER_REQUEST * (running + queued))
    assert sum(w.rows for w in work if w.sequence.id >= decoding) <= allowed


def test_prompts_have_the_whole_step_while_nobody_decodes() -> None:
    scheduler = Scheduler(Caches((0,), (600,), 64), 4, 4096, 256)
    scheduler.add(sequence(0, 4000, 5))
    assert [w.rows for w in step(scheduler, [])] == [4000]
    scheduler.add(sequence(1, 4000, 5, 10**6))
    assert [(w.sequence.id, w.rows) for w in step(scheduler, [])] == [(0, 1), (1, 256)]


def test_prompts_get_more_rows_where_more_requests_run_or_wait() -> None:
    # While prompts queue a large step ends on whole waves: 4,000 rows and a decode on 3,072.
    for decoding, waiting, rows in ((1, 0, 1024), (126, 1, 898), (299, 0, 2400), (1, 498, 3071)):
        scheduler = Scheduler(Caches((0,), (4000,), 64), decoding + 1, 16384, 1024)
        for id in range(decoding):
            scheduler.add(sequence(id, 1, 100, 10 * id))
        step(scheduler, [], check=False)
        for id in range(decoding, decoding + 1 + waiting):
            scheduler.add(sequence(id, 12_000, 5, 10**6 * id))
        assert sum(w.rows for w in scheduler.schedule() if w.rows > 1) == rows


def test_a_sequence_is_in_the_next_step_whatever_is_known_of_its_token() -> None:
    """Constraints that depend on it are made before the step is sampled."""
    scheduler = Scheduler(Caches((0,), (600,), 64), 4, 64)
    plain, counted = sequence(0, 4, 9), sequence(1, 4, 9, 100)
    counted.constrained = True
    for one in (plain, counted):
        scheduler.add(one)
    scheduler.advance(scheduler.schedule())
    for one in (plain, counted):
        one.pending = 1
    assert [w.sequence.id for w in scheduler.schedule()] == [0, 1]


def test_a_step_s_cost_grows_with_its_sequences_and_not_with_their_square() -> None:
    """Counts hashes and comparisons of sequences in a step of 4,096; no time is measured."""
    lookups = 0

    class Counted(Sequence):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal lookups
            lookups += 1
            return id(self)

        def __eq__(self, other: object) -> bool:
            nonlocal lookups
            lookups += 1
            return self is other

    count = 4096
    scheduler = Scheduler(Caches((0,), (20_000,), 64), count, count)
    made = [Counted(i, [i], 1, SamplingParams(10)) for i in range(count)]
    for one in made:
        scheduler.add(one)
    scheduler.advance(scheduler.schedule())
    for one in made:
        one.tokens.append(7)
    lookups = 0
    assert len(scheduler.schedule()) == count
    for one in reversed(made):
        scheduler.remove(one)
    assert lookups <= 10 * count


def test_ten_thousand_random_aborts_leave_every_page_free_or_cached() -> None:
    """L12."""
    rng = random.Random(1)
    scheduler = Scheduler(Caches((0,), (40,), 64), 6, 48)
    live: list[Sequence] = []
    done: list[int] = []
    for id in range(10_000):
        live.append(sequence(id, rng.randint(1, 80), rng.randint(1, 40), rng.randint(0, 5)))
        scheduler.add(live[-1])
        if rng.random() < 0.6:
            step(scheduler, done)
        victim = live.pop(rng.randrange(len(live)))
        scheduler.remove(victim)
    for item in live:
        scheduler.remove(item)
    assert scheduler.idle
    assert scheduler.caches.used == 0
    assert scheduler.caches.pools[0].free + scheduler.caches.cached == scheduler.caches.total


def unconfirmed(scheduler: Scheduler) -> set[int]:
    """Pages of the prefix cache that no finite result depends on."""
    return scheduler.caches.pools[0]._unconfirmed & set(scheduler.caches.pools[0]._hash_of)


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_nobody_confirmed_leave_the_prefix_cache_with_their_last_client(
    seed: int,
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(Caches((0,), (24,), 64), 6, 12)
    live: list[Sequence] = []
    for id in range(2000):
        live.append(sequence(id, rng.randint(1, 120), rng.randint(1, 90), rng.randint(0, 2)))
        scheduler.add(live[-1])
        for _ in range(rng.randint(0, 24)):
            step(scheduler, [])
        if len(live) > 8:
            scheduler.remove(live.pop(rng.randrange(len(live))))
        owed = {key for each in (*scheduler.running, *scheduler.waiting) for key in each.chain}
        assert unconfirmed(scheduler) <= set(scheduler.caches.pools[0].known(list(owed)))
    for each in live:
        scheduler.remove(each)
    assert scheduler.preemptions > 50 and not unconfirmed(scheduler)


def test_a_client_that_leaves_a_preempted_prompt_leaves_nothing_unconfirmed() -> None:
    """The next request of that prompt found its pages, and failed with what was wrong in them."""
    scheduler = Scheduler(Caches((0,), (1 + 8,), 64), 2, 3)
    old, young = sequence(0, 16, 90), sequence(1, 96, 4, base=500)
    scheduler.add(old)
    step(scheduler, [])
    scheduler.add(young)
    while not scheduler.preemptions:
        step(scheduler, [])
    assert young in scheduler.waiting and unconfirmed(scheduler)
    scheduler.remove(young)
    assert not unconfirmed(scheduler) & set(scheduler.caches.pools[0].known(young.chain))
    scheduler.caches.check([each.table for each in scheduler.running])


def test_decodes_go_before_prompt_chunks() -> None:
    scheduler = Scheduler(Caches((0,), (50,), 64), 4, 16)
    scheduler.add(sequence(0, 4, 10))
    step(scheduler, [])
    scheduler.add(sequence(1, 100, 5))
    work = step(scheduler, [])
    assert [(w.sequence.id, w.rows) for w in work] == [(0, 1), (1, 15)]
    work = step(scheduler, [])
    assert [(w.sequence.id, w.rows) for w in work] == [(0, 1), (1, 15)]


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = Scheduler(Caches((0,), (50,), 64), 4, 64)
    scheduler.add(sequence(0, 40, 1))
    step(scheduler, [])
    scheduler.add(sequence(1, 40, 1))
    work = step(scheduler, [])
    assert [(w.start, w.rows) for w in work] == [(32, 8)]


def test_a_prefix_hit_never_covers_a_position_whose_logprob_is_asked() -> None:
    scheduler = Scheduler(Caches((0,), (50,), 64), 4, 64)
    scheduler.add(sequence(0, 40, 1))
    step(scheduler, [])
    scheduler.add(sequence(1, 40, 1, scored=True))
    assert [(w.start, w.rows) for w in step(scheduler, [])] == [(0, 40)]


@pytest.mark.parametrize(("start", "hit"), [(0, 0), (1, 0), (16, 0), (17, 16), (33, 32), (40, 32)])
def test_scoring_from_the_middle_lets_the_front_come_from_the_cache(start: int, hit: int) -> None:
    scheduler = Scheduler(Caches((0,), (50,), 64), 4, 64)
    scheduler.add(sequence(0, 40, 1))
    step(scheduler, [])
    late = sequence(1, 40, 1)
    late.params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    late.scored = start  # before it was preempted
    scheduler.add(late)
    assert step(scheduler, [])[0].start == hit


@pytest.mark.fault("F55", shows="the youngest sequence gives its pages and starts again")
def test_pages_come_from_the_youngest_and_it_starts_again() -> None:
    scheduler = Scheduler(Caches((0,), (1 + 6,), 64), 2, 64)
    old, young = sequence(0, 30, 60), sequence(1, 16, 60, base=500)
    scheduler.add(old)
    scheduler.add(young)
    done: list[int] = []
    while not scheduler.preemptions:
        step(scheduler, done)
    assert scheduler.waiting[0] is young
    before = list(young.tokens)
    while not scheduler.idle:
        step(scheduler, done)
    assert done == [0, 1]
    assert young.tokens[: len(before)] == before
    assert young.length - young.prompt_length == 60


@pytest.mark.parametrize(("tokens", "start"), [(42, 32), (64, 48), (65, 64), (66, 64), (100, 96)])
@pytest.mark.parametrize("more", [{}, {"cache_salt": "mine"}, {"prompt_logprobs": 1}])
def test_a_preempted_sequence_computes_again_what_is_behind_its_last_full_page(
    tokens: int, start: int, more: dict[str, Any]
) -> None:
    """Of its answer too, and where the logprobs of its prompt have left the engine."""
    scheduler = Scheduler(Caches((0,), (50,), 64), 2, 128)
    params = SamplingParams(max_tokens=90, **more)
    one = Sequence(0, list(range(40)), 40, params)
    scheduler.add(one)
    while len(one.tokens) < tokens:
        step(scheduler, [])
        one.scored = 40
    scheduler._preempt(one)
    assert [(w.start, w.rows) for w in step(scheduler, [])] == [(start, tokens - start)]
    pool = scheduler.caches.pools[0]
    assert pool.used == pages_for(tokens) and pool.free + pool.used + pool.cached == pool.total


def test_a_full_pool_admits_nobody_new() -> None:
    scheduler = Scheduler(Caches((0,), (5,), 64), 4, 64)
    scheduler.add(sequence(0, 60, 4))
    scheduler.add(sequence(1, 20, 4, base=90))
    step(scheduler, [])
    assert [s.id for s in scheduler.running] == [0]
    assert pages_for(60) == scheduler.caches.used


@pytest.mark.parametrize("beside", [0, 1])
def test_a_prompt_s_last_row_runs_where_no_token_is_wanted(beside: int) -> None:
    """With max_tokens 0 a prompt is at its limit from the start: a step that leaves one row of it
    must be followed by one that has it."""
    scheduler = Scheduler(Caches((0,), (600,), 64), 4, 64, 32)
    for id in range(beside):
        scheduler.add(sequence(id, 1, 1000))
        step(scheduler, [])
    scheduler.add(sequence(9, 32 * 4 + 1, 0, 1000, scored=True))
    done: list[int] = []
    for _ in range(9):
        step(scheduler, done)
    assert done == [9]
