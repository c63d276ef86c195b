"""Caches by group of layers: a query finds the keys of its own tokens, whatever the windows."""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from engines import Guess, key_values, play_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import SHARED_TABLES, Scheduler
from kvline_server.engine.speculation import accepted
from kvline_server.engine.work import Work
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.arena import HostArena, KVShape
from kvline_server.memory.caches import Caches
from kvline_server.memory.groups import (
    CacheGroup,
    CacheSizes,
    GroupedArena,
    first_page,
    order,
    pages_at_most,
    parts,
)
from kvline_server.memory.pages import PAGE_SIZE, extend_chain, pages_for
from kvline_server.memory.parts import growing
from kvline_server.sizing.running import bounded
from kvline_server.sizing.settings import EngineSettings

SHAPE = KVShape(1, 1, 8, torch.float32)


def sizes(windows: tuple[int, ...], running: int, rows: int) -> CacheSizes:
    return CacheSizes(tuple(CacheGroup(w, (), SHAPE) for w in windows), running, rows)


def playing(
    windows: tuple[int, ...], running: int, rows: int, tokens: int
) -> tuple[Caches, Scheduler, Model]:
    caches = Caches(windows, sizes(windows, running, rows).pages(tokens), rows)
    return caches, Scheduler(caches, running, rows), Model(caches)


class Model:
    """Keeps in each page what was written there: all tokens up to it."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.kept: list[dict[tuple[int, int], int]] = [{} for _ in caches.windows]
        self.read = 0

    def run(self, work: list[Work]) -> None:
        tokens = [prefixes([*item.sequence.tokens, *item.drafts]) for item in work]
        for item, own in zip(work, tokens, strict=True):
            self.write(item, own)
        for item, own in zip(work, tokens, strict=True):
            self.attend(item, own)

    def places(self, sequence: Sequence, position: int) -> list[tuple[int, int]]:
        index, offset = divmod(position, PAGE_SIZE)
        return [(g.pages[index - g.first], offset) for g in sequence.table.groups]

    def write(self, item: Work, tokens: list[int]) -> None:
        for position in range(item.start, item.start + item.rows):
            for kept, at in zip(self.kept, self.places(item.sequence, position), strict=True):
                kept[at] = tokens[position]

    def attend(self, item: Work, tokens: list[int]) -> None:
        """What any of its rows sees: what one row finds, all do."""
        last = item.start + item.rows
        for group, window in enumerate(self.caches.windows):
            pages, kept = item.sequence.table.groups[group], self.kept[group]
            for seen in range(max(0, item.start + 1 - window) if window else 0, last):
                index, offset = divmod(seen, PAGE_SIZE)
                assert index >= pages.first, "a page that a query sees was given up"
                found = kept[pages.pages[index - pages.first], offset]
                assert found == tokens[seen], "another's key"
                self.read += 1


def prefixes(tokens: list[int]) -> list[int]:
    """A hash of all tokens up to each."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


def step(scheduler: Scheduler, model: Model, done: list[int]) -> list[Work]:
    work = scheduler.schedule()
    model.run(work)
    scheduler.advance(work)
    for item in work:
        sequence = item.sequence
        if item.start + item.rows == len(sequence.tokens) + len(item.drafts):
            sequence.tokens += [7] * (1 + accepted(item.drafts, [7] * item.rows))
            scheduler.confirm(sequence, len(sequence.tokens) - 1)
            if item.drafts:
                scheduler.truncate(sequence, len(sequence.tokens) - 1)
            if len(sequence.tokens) >= sequence.limit:
                scheduler.remove(sequence)
                done.append(sequence.id)
    scheduler.caches.check([each.table for each in scheduler.running])
    return work


def asked(id: int, length: int, output: int, base: int) -> Sequence:
    """Those of one base share the beginning of their prompts."""
    return Sequence(id, [base] * length, length, SamplingParams(max_tokens=output))


shapes = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=10
)


@settings(max_examples=120)
@given(
    shapes,
    st.sampled_from([(0, 20), (0, 33, 16), (0, 1), (64,), (33, 17)]),
    st.integers(15, 40),
    st.integers(1, 5),
    st.integers(5, 60),
    st.none() | st.integers(0, 1000),
)
def test_every_query_sees_its_own_tokens_and_every_sequence_ends(
    shapes: list[tuple[int, int, int]],
    windows: tuple[int, ...],
    pages: int,
    running: int,
    rows: int,
    drafting: int | None,
) -> None:
    """With prefix hits, preemption, chunks that end anywhere and drafts of this seed. Any sequence
    fits alone; groups with windows never lack a page, as many as running sequences and the rows of
    a step need."""
    rows = max(rows, running)
    caches = Caches(windows, sizes(windows, running, rows).pages(PAGE_SIZE * pages), rows)
    speculation = None if drafting is None else Guess(random.Random(drafting))
    scheduler = Scheduler(caches, running, rows, speculation=speculation)
    model = Model(caches)
    grow = caches.grow

    def grown(table: Any, tokens: int) -> bool:
        found = grow(table, tokens)
        missing = pages_for(tokens) - table.pages
        assert found or not caches.pools[0].can_take(missing), "a window lacked a page"
        return found

    caches.grow = grown  # type: ignore[method-assign]
    for id, shape in enumerate(shapes):
        scheduler.add(asked(id, *shape))
    play_to_end(scheduler, len(shapes), partial(step, scheduler, model))
    assert model.read


def test_a_window_keeps_what_the_next_query_sees_and_no_more() -> None:
    _, scheduler, model = playing((0, 32), 2, 512, 1024)
    one = asked(0, 400, 200, 1)
    scheduler.add(one)
    for _ in range(150):
        step(scheduler, model, [])
        whole, windowed = one.table.groups
        assert len(whole.pages) == pages_for(one.computed) == one.table.pages
        seen = one.computed // PAGE_SIZE * PAGE_SIZE - 31  # from the beginning of its last page
        assert windowed.first == max(0, seen) // PAGE_SIZE
        assert len(windowed.pages) <= pages_at_most(32, 1)


@pytest.mark.parametrize(("more", "reached"), [(0, 20), (5, 20), (100, 26)])
def test_a_prefix_is_found_as_far_as_every_group_has_the_last_window_before_it(
    more: int, reached: int
) -> None:
    """The first sequence ended at 320 + `more` tokens: the window's pages of what lies before its
    last ones have left the prefix cache, and with them all shorter prefixes."""
    caches, scheduler, model = playing((0, 48), 2, 512, 4096)
    first = asked(0, 320, 1 + more, 1)
    scheduler.add(first)
    while not scheduler.idle:
        step(scheduler, model, [])
    chain: list[bytes] = []
    extend_chain(chain, first.tokens, 1000)
    table = caches.match(chain)
    assert table.pages == reached
    assert [group.first for group in table.groups] == [0, reached - 3]
    caches.release(table)
    assert caches.match(chain[: reached - 1]).pages == 0, "its last window is not whole"


def test_a_prompt_with_a_hit_waits_for_no_pages_that_windows_gave_up() -> None:
    """Five sequences hold 2 pages each of a window of 16; all pages that they ever had are more
    than page tables may have."""
    caches, scheduler, model = playing((16,), 8, 16, 256)
    for id in range(5):
        scheduler.add(asked(id, 320, 300, id))
    while any(each.uncomputed > 1 for each in scheduler.running) or scheduler.waiting:
        step(scheduler, model, [])
    twin = next(each for each in scheduler.running if each.id == 3)
    one = Sequence(99, list(twin.tokens), len(twin.tokens), SamplingParams(max_tokens=300))
    scheduler.add(one)
    step(scheduler, model, [])
    assert one in scheduler.running and one.cached >= 320
    assert sum(each.table.pages for each in scheduler.running) > SHARED_TABLES * caches.total


class Digest(bytes):
    """A key that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        Digest.lookups += 1
        return super().__hash__()


@pytest.mark.parametrize(("windows", "seen"), [((0, 1024), 2048 + 64), ((4096,), 256)])
def test_a_prompt_that_waits_is_looked_up_once(windows: tuple[int, ...], seen: int) -> None:
    """The head of the queue asks in each step. Of a window only its own pages are looked up, and no
    page twice where nothing is known."""
    caches = Caches(windows, (3000,) * len(windows), 8192)
    known: list[bytes] = [Digest(n.to_bytes(4, "big")) for n in range(2048)]
    others: list[bytes] = [Digest(b"x" + each) for each in known]
    table = caches.match([])
    caches.grow(table, 2048 * PAGE_SIZE)
    caches.publish(table, 0, known)
    Digest.lookups = 0
    assert caches._reach(known) == 2048
    assert Digest.lookups <= seen
    Digest.lookups = 0
    assert caches._reach(others) == 0
    assert Digest.lookups <= 2048


@settings(max_examples=150)
@given(
    st.sampled_from([(0,), (0, 33), (0, 17, 65), (33,), (65, 17), (49, 1)]),
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=3, max_size=3),
)
def test_the_longest_prefix_is_found_whatever_a_group_has_lost(
    windows: tuple[int, ...], lost: list[list[bool]]
) -> None:
    caches = Caches(windows, (13,) * len(windows), 16)
    hashes = [bytes([n]) for n in range(12)]
    table = caches.match([])
    caches.grow(table, 12 * PAGE_SIZE)
    caches.publish(table, 0, hashes)
    known = [[not gone for gone in each] for each in lost[: len(windows)]]
    for pool, group, kept in zip(caches.pools, table.groups, known, strict=True):
        pool.retract([page for page, has in zip(group.pages, kept, strict=True) if not has])
    longest = max(
        count
        for count in range(13)
        if all(all(k[first_page(w, count) : count]) for k, w in zip(known, windows, strict=True))
    )
    found = caches.match(hashes)
    assert found.pages == longest
    caches.release(found)
    caches.check([table])


def test_what_was_not_finite_leaves_every_group() -> None:
    caches, scheduler, model = playing((0, 48), 2, 64, 4096)
    one = asked(0, 200, 50, 1)
    scheduler.add(one)
    for _ in range(30):
        step(scheduler, model, [])
    assert all(pool.known(one.chain) for pool in caches.pools)
    scheduler.fail(one)
    assert not any(pool.known(one.chain) for pool in caches.pools)
    scheduler.remove(one)
    assert not any(pool.known(one.chain) or pool.used for pool in caches.pools)


def test_pages_are_cleared_in_the_group_that_they_are_of() -> None:
    rng = random.Random(1)
    caches, scheduler, model = playing((0, 20), 3, 40, 640)
    for id in range(12):
        scheduler.add(asked(id, rng.randint(1, 150), 20, id))
    while not scheduler.idle:
        step(scheduler, model, [])
        cleared = caches.to_clear()
        for pages, pool in zip(cleared, caches.pools, strict=True):
            assert len(set(pages)) == len(pages) and all(1 <= p <= pool.total for p in pages)
        assert caches.to_clear() == [[], []]


def test_layers_of_one_window_are_a_group_and_the_first_has_all_tokens() -> None:
    assert order((0, 8, 0, 8, 4), 100) == {0: (0, 2), 8: (1, 3), 4: (4,)}
    assert list(order((0, 8, 0, 8, 4), 100)) == [0, 8, 4]
    assert order((8, 8), 100) == {8: (0, 1)}
    assert order((8, 16), 8) == {0: (0, 1)}, "windows that hide nothing are none"
    assert list(order((4, 16), 100)) == [16, 4]


def test_a_budget_of_full_layers_beside_the_windows_of_all_sequences() -> None:
    """Gemma 3 of 12B: 8 of 48 layers have no window, 8 key heads of 256, bfloat16."""
    kept = {n: KVShape(n, 8, 256, torch.bfloat16) for n in (8, 40)}
    groups = (CacheGroup(0, (), kept[8]), CacheGroup(1024, (), kept[40]))
    made = CacheSizes(groups, 128, 8192)
    first, windows = made.pages(16 * 1000)
    assert first == 1001 and windows == 1 + 128 * (1 + 65) + 512
    owned = parts(groups)
    assert [part.name for part in owned] == ["kv-cache", "windows"]
    rows = 16 * (512 + 1)
    assert growing(owned, 0, 128, rows) == windows * 16 * 2 * 40 * 8 * 256 * 2
    assert growing(owned, 16, 128, rows) - growing(owned, 0, 128, rows) == 16 * 2 * 8 * 8 * 256 * 2
    every = CacheSizes((CacheGroup(4096, (), kept[40]),), 128, 512)
    assert len(every.pages(16)) == 1 and growing(parts(every.groups), 0, 128, 512) == 0
    assert every.sequence_tokens(32768) == PAGE_SIZE * pages_at_most(4096, 1)


def test_as_many_requests_run_as_leave_half_of_what_remains_to_the_full_layers() -> None:
    """Of Gemma 3 of 12B on an H200 512 windows of 1,024 tokens are more than the GPU has."""
    kept = {n: KVShape(n, 8, 256, torch.bfloat16) for n in (8, 40)}
    groups = (CacheGroup(0, (), kept[8]), CacheGroup(1024, (), kept[40]))
    settings = EngineSettings(8192, 131072, 512, 8192, 20, 256, 1024, None)
    left = 114 << 30
    running = bounded(settings, parts(groups), left)
    assert running == 128
    for count, fits in ((running, True), (2 * running, False)):
        taken = growing(parts(groups), 0, count, settings.mapped_rows)
        assert (taken <= left // 2) is fits
    assert bounded(settings, parts(groups), 12 << 30) == 8
    assert bounded(settings, parts(groups), 1 << 30) == 1, "no more than must be, if any starts"
    assert bounded(settings, parts(groups[:1]), 1 << 30) == 512, "without windows all may run"


def test_an_arena_of_groups_has_the_layers_in_the_model_s_order() -> None:
    groups = (
        CacheGroup(0, (1,), KVShape(1, 1, 8, torch.float32)),
        CacheGroup(20, (0, 2), KVShape(2, 1, 8, torch.float32)),
    )
    arena = GroupedArena(groups, HostArena, 1 << 20)
    arena.resize((9, 5))
    assert [len(layer.keys) for layer in key_values(arena)] == [5, 9, 5]
    assert (
        arena.pages == (9, 5)
        and arena.nbytes == 9 * groups[0].page_bytes + 5 * groups[1].page_bytes
    )
    for layer in key_values(arena):
        layer.keys.fill_(1.0)
    arena.clear(1, torch.tensor([3]))
    assert [float(layer.keys[3].sum()) for layer in key_values(arena)] == [0.0, 128.0, 0.0]


@given(st.integers(1, 90), st.integers(1, 70), st.integers(0, 300))
def test_no_sequence_has_more_pages_than_at_most(window: int, rows: int, start: int) -> None:
    held = pages_for(start + rows) - first_page(window, start // PAGE_SIZE)
    assert held <= pages_at_most(window, rows)
