"""The caches as the scheduler uses them: a page pool for each group of layers with a KV cache
(groups.py), and a pool of slots where other layers keep a state of each sequence (states.py).

A sequence's pages end at the same token in every group. They begin at its first token, or where a
window begins: the group gives up what every later query is too far from. Invariant after every
call: each pool's own (pages.py), and a sequence holds as many pages in a group as its tokens there
take.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvline_server.memory.groups import first_page, pages_at_most, sequence_tokens
from kvline_server.memory.pages import PAGE_SIZE, PagePool, pages_for
from kvline_server.memory.states import StatePool, StateStep, StateTable


@dataclass(slots=True)
class GroupPages:
    """A sequence's pages in one group."""

    first: int = 0  # which of the sequence's pages is the first of these
    pages: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class PageTable:
    """A sequence's pages, of its first `pages` in all."""

    groups: tuple[GroupPages, ...] = ()  # none before it is admitted
    pages: int = 0
    found: int = 0  # pages of its prefix that the page pools had, some of no use without a state
    states: StateTable | None = None  # of recurrent layers
    step: StateStep | None = None  # theirs, of the step that is built next

    @property
    def tokens(self) -> int:
        """That have pages, in whole pages."""
        return self.pages * PAGE_SIZE

    @property
    def held(self) -> int:
        """Pages that it holds in the first group, which has the most."""
        return len(self.groups[0].pages)


class Caches:
    def __init__(
        self,
        windows: tuple[int, ...],
        pages: tuple[int, ...],
        rows: int,
        states: StatePool | None = None,
    ) -> None:
        """Of each group; steps have `rows` rows at most. `states` are of recurrent layers."""
        self.states = states
        self.windows = windows
        self.windowed = any(windows)
        self.pools = [PagePool(count) for count in pages]
        self._most = [pages_at_most(window, rows) if window else 0 for window in windows]

    @property
    def total(self) -> int:
        """Pages of the KV cache's tokens, the first group's; so are the next two."""
        return self.pools[0].total

    @property
    def used(self) -> int:
        return self.pools[0].used

    @property
    def cached(self) -> int:
        return self.pools[0].cached

    def sequence_tokens(self, tokens: int) -> int:
        """Of the KV cache that a sequence of so many takes."""
        return sequence_tokens(self.windows[0], tokens)

    def most_held(self, tokens: int) -> int:
        """PageTable.held of a sequence of so many tokens, at most."""
        pages, most = pages_for(tokens), self._most[0]
        return min(pages, most) if most else pages

    def match(self, hashes: list[bytes]) -> PageTable:
        """Pages of the longest prefix of `hashes` which every group has as much of as the next
        query sees, and behind which a state stands where there are recurrent layers."""
        found = count = self._reach(hashes)
        if self.states is not None:
            while (reach := self.states.reach(hashes[:count])) < count:
                count = self._reach(hashes[:reach])
        groups = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = first_page(window, count)
            groups.append(GroupPages(first, array("i", pool.hold(hashes[first:count]))))
        return PageTable(tuple(groups), count, found)

    def admit(self, table: PageTable, hashes: list[bytes], tokens: int) -> None:
        """A sequence of so many tokens runs from now on, with what `match` of its `hashes` gave."""
        if self.states is not None:
            table.states = self.states.admit(hashes, table.found, table.pages, tokens)

    def _reach(self, hashes: list[bytes]) -> int:
        """Pages of that prefix. The head of the queue asks in each step: of each group a page is
        checked once, from the end, as one that it lacks ends all prefixes that are longer."""
        count = len(hashes) if self.windows[0] else self.pools[0].prefix(hashes)
        if not self.windowed:
            return count
        found = [count] * len(self.pools)  # each group has the pages from here to `count`
        while True:
            before = count
            for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
                first = first_page(window, count)
                if window and first < found[group]:
                    end = pool.end(hashes, first, min(count, found[group]))
                    if end is None:
                        found[group] = first
                    else:
                        found[group] = count = end
            if count == before:
                return count

    def fits(self, table: PageTable, tokens: int, beside: int) -> bool:
        """Whether a sequence of so many tokens can run on with these pages, step by step, and
        `beside` more pages be taken then."""
        missing = pages_for(tokens) - table.pages
        if not self.windowed:
            return self.pools[0].can_take(max(0, missing) + beside)
        for pool, most, group in zip(self.pools, self._most, table.groups, strict=True):
            held = min(missing, most - len(group.pages)) if most else missing
            if not pool.can_take(max(0, held) + (beside if pool is self.pools[0] else 0)):
                return False
        return True

    def grow(self, table: PageTable, tokens: int) -> bool:
        """Takes the pages that so many tokens lack. -> whether it could; else none is taken"""
        missing = pages_for(tokens) - table.pages
        if missing > 0:
            for pool in self.pools:
                if not pool.can_take(missing):
                    return False
            for pool, group in zip(self.pools, table.groups, strict=True):
                group.pages.extend(pool.take(missing))
            table.pages += missing
        return True

    def slide(self, table: PageTable, position: int) -> None:
        """Gives up the pages that no query from this position's page on sees, so that a prefix that
        ends with the page before is found. A step that still reads them is launched: later ones
        write behind it."""
        for pool, group, window in zip(self.pools, table.groups, self.windows, strict=True):
            left = first_page(window, position // PAGE_SIZE) - group.first
            if left > 0:
                pool.drop(group.pages[:left])
                del group.pages[:left]
                group.first += left

    def publish(self, table: PageTable, first: int, hashes: list[bytes]) -> None:
        """Enters a sequence's full pages from `first` on in the prefix cache, by these hashes."""
        for pool, group in zip(self.pools, table.groups, strict=True):
            at = first - group.first
            for page, digest in zip(group.pages[max(0, at) :], hashes[max(0, -at) :], strict=False):
                pool.publish(page, digest)

    def plan(
        self, table: PageTable, start: int, rows: int, hashes: list[bytes], drafts: int = 0
    ) -> None:
        """Which states the next step reads and writes, which computes so many rows of the sequence
        from `start` on, the last of them `drafts`. That step must be launched, and `launched` be
        called behind it."""
        if self.states is not None and table.states is not None:
            table.step = self.states.plan(table.states, start, rows, hashes, drafts)

    def accept(self, table: PageTable, tokens: int) -> None:
        """After drafts were read: the sequence goes on behind so many tokens."""
        if self.states is not None and table.states is not None:
            self.states.accept(table.states, tokens)

    def launched(self) -> None:
        """The step that was planned: prefixes find the states that it keeps."""
        if self.states is not None:
            self.states.publish()

    def confirm_states(self, table: PageTable, tokens: int) -> None:
        """After a finite result that depends on so many tokens of the sequence."""
        assert self.states is not None
        if table.states is not None:
            self.states.confirm(table.states, tokens)

    def confirm(self, table: PageTable, first: int, last: int) -> None:
        """After a finite result that depends on all that was written to pages first..last."""
        for pool, group in zip(self.pools, table.groups, strict=True):
            pool.confirm(group.pages[max(0, first - group.first) : max(0, last - group.first)])

    def retract(self, table: PageTable, hashes: list[bytes]) -> None:
        """After a result that was not finite, of a sequence with these pages, or with these hashes
        once it has none: the prefix cache forgets them all."""
        for index, pool in enumerate(self.pools):
            pool.retract(table.groups[index].pages if table.groups else pool.known(hashes))
        if self.states is not None:
            self.states.retract(hashes)

    def abandon(self, hashes: list[bytes]) -> None:
        """The sequence has left: the prefix cache forgets what of it is not confirmed and nobody
        else holds."""
        for pool in self.pools:
            pool.abandon(pool.known(hashes))
        if self.states is not None:
            self.states.abandon(hashes)

    def release_state(
        self, table: PageTable, computed: int, confirmed: int, hashes: list[bytes]
    ) -> None:
        """StatePool.release, before the pages'."""
        if self.states is not None and table.states is not None:
            self.states.release(table.states, computed, confirmed, hashes)

    def release(self, table: PageTable) -> None:
        for pool, group in zip(self.pools, table.groups, strict=True):
            pool.release(group.pages)

    def to_clear(self) -> list[list[int]]:
        """Of each group, the pages to be cleared before the next step; each call tells others."""
        return [pool.to_clear() for pool in self.pools]

    def check(self, tables: list[PageTable]) -> None:
        """Raises AssertionError where an invariant does not hold; `tables` are all that hold."""
        for index, pool in enumerate(self.pools):
            pool.check()
            assert pool.used == len({page for t in tables for page in t.groups[index].pages})
        if self.states is not None:
            self.states.check([table.states for table in tables if table.states is not None])
        for table in tables:
            assert all(g.first + len(g.pages) == table.pages for g in table.groups), (
                "a page is lost"
            )
