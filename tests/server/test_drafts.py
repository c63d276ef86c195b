"""Draft tokens before a model: where they come from, how many pay, and what the scheduler does with
them. F55."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from functools import partial

import numpy as np
import pytest
from engines import Guess, play_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.engine import ngrams
from kvline_server.engine.batch import build
from kvline_server.engine.ngrams import LONG, SHORT, Ngrams, table_bytes
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Speculation, accepted, decode_rows
from kvline_server.engine.work import Kind, Work
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.layout import GroupLayout
from kvline_server.memory.caches import Caches, GroupPages, PageTable
from kvline_server.memory.pages import PAGE_SIZE, pages_for


def read(tokens: list[int], each: int = 1) -> Ngrams:
    made = Ngrams(4096)
    for end in (*range(each, len(tokens), each), len(tokens)):
        made.read(tokens[:end])
    return made


def drafted(tokens: list[int], count: int, each: int = 1) -> list[int]:
    made = read(tokens, each)
    return made.draft(tokens, count) if made.worth(0.0, count) else []


def test_drafts_are_what_came_after_the_last_tokens_before() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 1, 2], 3) == [3, 4, 5]
    assert drafted([1, 2, 3, 4, 5, 6, 7, 8], 3) == []
    assert drafted([5], 3) == drafted([], 3) == []
    # Of two places the one with more of the same tokens before it, and else the later one.
    assert drafted([1, 2, 3, 4, 90, 7, 3, 4, 80, 1, 2, 3, 4], 1) == [90]
    assert drafted([9, 3, 4, 90, 7, 3, 4, 80, 8, 3, 4], 1) == [80]


def test_a_text_that_repeats_itself_goes_on_as_it_does() -> None:
    assert drafted([8, 7, 7, 7], 5) == [7] * 5
    assert drafted([1, 2, 1, 2, 1], 4) == [2, 1, 2, 1]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=80, max_size=200), st.integers(1, 200))
def test_a_prompt_read_at_once_predicts_as_one_read_token_by_token(
    tokens: list[int], first: int
) -> None:
    """Where nothing was followed before its end."""
    slow, quick = Ngrams(4096), Ngrams(4096)
    for end in range(1, len(tokens) + 1):
        slow.read(tokens[:end])
    first = min(first, len(tokens))
    quick.read(tokens[:first])
    quick.read(tokens)
    assert list(slow._short) == list(quick._short) and list(slow._long) == list(quick._long)


def test_tables_have_a_bound_and_hashes_that_collide_predict_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert table_bytes(10**6) == table_bytes(10**5) == 256 << 10
    monkeypatch.setattr(ngrams, "MOST_BITS", 6)
    rng = random.Random(0)
    tokens = [rng.randrange(50) for _ in range(3000)]
    made = Ngrams(4096)
    for end in range(1, len(tokens)):
        made.read(tokens[:end])
        if made._next and end > SHORT:
            assert tokens[made._next - 1] == tokens[end - 1]
    assert LONG > SHORT


def test_a_token_costs_few_microseconds() -> None:
    """On a machine that does nothing else some 1.5; a bound that only another order would pass."""
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(20_000)]
    made = Ngrams(1 << 17)
    began = time.process_time()
    for end in range(1, 4000):
        made.read(tokens[:end])
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [([1, 2], [1, 2, 3], 2), ([1, 2], [1, 5, 3], 1), ([1, 2], [5, 2, 3], 0), ([], [4], 0)],
)
def test_a_draft_is_accepted_behind_accepted_ones(
    drafts: list[int], sampled: list[int], count: int
) -> None:
    assert accepted(drafts, sampled) == count


@pytest.mark.parametrize(
    ("rate", "cost", "least", "most"),
    [
        (0.95, 0.0, 6.5, 7),  # rows that take no time
        (0.95, 0.05, 4, 7),
        (0.3, 0.05, 1, 2.5),
        (0.95, 1.0, 0, 0.3),  # as much as a step of one
        (0.05, 0.2, 0, 0.1),
    ],
)
def test_as_many_draft_tokens_are_tried_as_pay(
    rate: float, cost: float, least: float, most: float
) -> None:
    """By what rows take and what is accepted; where none pay, one is tried now and then."""
    speculation, text = Speculation(7), read([1, 2, 3] * 10)
    one = sequence(0, 30, 10_000)
    one.proposer, text.rate = text, rate
    counts = []
    for _ in range(1200):
        speculation.refresh()
        count = len(speculation.draft(one, 100))
        counts.append(count)
        speculation.costs.add(1 + count, 1 + text.gain(count), 1 + cost * count, 0.0)
    late = counts[600:]
    assert least <= sum(late) / len(late) <= most
    assert max(late) > 0, "what a row takes is asked again"


def test_what_did_not_come_is_expected_less() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(4) for _ in range(400)]
    random_text, repeated = read(tokens), read([1, 2, 3, 4] * 100)
    assert random_text.rate < 0.5 < 0.95 < repeated.rate
    assert repeated.gain(7) > 5 * random_text.gain(7)


def sequence(id: int, prompt: int, output: int, salt: str = "") -> Sequence:
    params = SamplingParams(max_tokens=output, cache_salt=salt)
    return Sequence(id, [i % 5 for i in range(prompt)], prompt, params)


def step(scheduler: Scheduler, done: list[int]) -> list[Work]:
    """One step of a model that always outputs 7, and its results."""
    before = {each: each.table.pages for each in scheduler.running}
    pool, preemptions = scheduler.caches.pools[0], scheduler.preemptions
    left = pool.free + pool.cached
    work = scheduler.schedule()
    decodes = [w for w in work if w.kind is Kind.DECODE]
    most = decode_rows(scheduler.max_running, scheduler.max_step_tokens, 7)
    assert sum(w.rows for w in decodes) <= most
    assert sum(w.rows for w in work) <= scheduler.max_step_tokens
    for w in work:
        assert w.start == w.sequence.computed
        assert w.sequence.table.tokens >= w.start + w.rows
        if w.kind is Kind.DECODE:
            assert w.rows == 1 + len(w.drafts) and w.start + w.rows <= w.sequence.limit
            plain = max(before.get(w.sequence, 0), pages_for(w.start + 1))
            if w.sequence.table.pages > plain and scheduler.preemptions == preemptions:
                assert left > len(before), "a page for a draft, which others may need"
    scheduler.advance(work)
    for w in work:
        sequence = w.sequence
        if w.kind is Kind.PROMPT and w.start + w.rows < sequence.length:
            continue
        kept = 1 + accepted(w.drafts, [7] * w.rows)
        sequence.tokens += [7] * kept
        scheduler.confirm(sequence, len(sequence.tokens) - 1)
        scheduler.truncate(sequence, len(sequence.tokens) - 1)
        assert sequence.computed == len(sequence.tokens) - 1
        assert sequence.published * PAGE_SIZE <= len(sequence.tokens) - 1
        if len(sequence.tokens) >= sequence.limit:
            assert len(sequence.tokens) == sequence.limit
            scheduler.remove(sequence)
            done.append(sequence.id)
    scheduler.caches.check([each.table for each in scheduler.running])
    return work


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(7, 20),
    st.integers(1, 5),
    st.integers(8, 60),
    st.integers(0, 1000),
)
@pytest.mark.fault(
    "F55",
    shows="random drafts over few pages: every sequence ends, none longer than asked, and drafts "
    "take a page only where each may",
)
def test_every_sequence_ends_with_drafts(
    shapes: list[tuple[int, int]], pages: int, running: int, tokens: int, seed: int
) -> None:
    speculation = Guess(random.Random(seed))
    rows = max(tokens, running)
    scheduler = Scheduler(Caches((0,), (pages,), rows), running, rows, None, speculation)
    for id, (prompt, output) in enumerate(shapes):
        scheduler.add(sequence(id, prompt, output))
    play_to_end(scheduler, len(shapes), partial(step, scheduler))


def test_drafts_leave_half_of_a_step_to_prompts() -> None:
    scheduler = Scheduler(Caches((0,), (4000,), 128), 64, 128, None, Guess(random.Random(0)))
    for id in range(63):
        scheduler.add(sequence(id, 3, 10_000, str(id)))
    while len(scheduler.running) < 63 or any(s.uncomputed > 1 for s in scheduler.running):
        step(scheduler, [])
    scheduler.add(sequence(63, 5000, 1, "long"))
    for _ in range(5):
        work = step(scheduler, [])
        assert sum(w.rows for w in work if w.kind is Kind.PROMPT) >= 128 - 64


def test_each_row_of_a_decode_is_a_sequence_of_one_token_more() -> None:
    """For kernels of one query; what stands behind the decodes stays. In one group all pages are
    kept, in another those from the second on."""
    work = []
    free = iter(range(1, 100))
    for id, (known, drafts, kind) in enumerate(
        ((15, 3, Kind.DECODE), (40, 0, Kind.DECODE), (33, 1, Kind.DECODE), (20, 0, Kind.PROMPT))
    ):
        one = sequence(id, known, 99)
        held = array("i", [next(free) for _ in range(pages_for(known + drafts))])
        start = known - 1 if kind is Kind.DECODE else 4
        first = int(start >= PAGE_SIZE)
        one.table = PageTable((GroupPages(0, held), GroupPages(first, held[first:])), len(held))
        work.append(Work(one, start, known + drafts - start, kind, [7] * drafts))
    layout = build(work).step.layout
    apart = layout.apart()
    assert (layout.decodes, layout.decode_rows, apart.decodes) == (3, 7, 7)
    assert apart.row_starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 23]
    every, windowed = apart.groups
    assert every.lengths.tolist() == [40, 33, 34, 15, 16, 17, 18, 20]
    assert windowed.lengths.tolist() == [24, 17, 18, 15, 16, 17, 18, 20]
    own = [w.sequence.table.groups[0].pages.tolist() for w in work]
    crossing, plain, short, prompt = own
    tail = [crossing[:1], crossing[:1], crossing, crossing, prompt]
    assert tables(every) == [plain, short, short, *tail]
    assert tables(windowed) == [plain[1:], short[1:], short[1:], *tail]
    assert np.array_equal(apart.positions, layout.positions)
    for group, before in zip(apart.groups, layout.groups, strict=True):
        assert np.array_equal(group.slots, before.slots)
        arrays = group.lengths, group.page_starts, group.pages
        assert all(each.dtype == np.int32 for each in (apart.row_starts, *arrays))
    assert apart.apart() is apart


def tables(group: GroupLayout) -> list[list[int]]:
    starts = group.page_starts
    return [group.pages[a:b].tolist() for a, b in itertools.pairwise(starts)]
