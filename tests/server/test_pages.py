"""Pages: none is ever lost, none is ever in two places. Invariant 2."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvline_server.memory.pages import DUMMY_PAGE, PagePool, extend_chain, pages_for


class Pool(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)

    @rule(target=held, count=st.integers(0, 5))
    def take(self, count: int) -> list[int]:
        if not self.pool.can_take(count):
            return []
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert DUMMY_PAGE not in pages
        return pages

    @rule(pages=held, number=st.integers(0, 20))
    def publish(self, pages: list[int], number: int) -> None:
        for index, page in enumerate(pages):
            if page in self.pool._references:
                self.pool.publish(page, f"{number}-{index}".encode())

    @rule(target=held, number=st.integers(0, 20))
    def match(self, number: int) -> list[int]:
        return self.pool.match([f"{number}-{i}".encode() for i in range(5)])

    @rule(pages=consumes(held))
    def release(self, pages: list[int]) -> None:
        self.pool.release(pages)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check()
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total


Pool.TestCase.settings = settings(max_examples=60)
TestPool = Pool.TestCase


def test_a_released_page_with_a_name_is_found_again_until_it_is_needed() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.publish(pages[0], b"a")
    pool.release(pages)
    assert (pool.free, pool.cached, pool.used) == (2, 1, 0)
    assert pool.match([b"a", b"b"]) == [pages[0]]
    pool.release([pages[0]])
    assert len(pool.take(3)) == 3
    assert pool.match([b"a"]) == []


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="dummy"):
        PagePool(1)


def test_chains_name_the_whole_prefix() -> None:
    one: list[bytes] = []
    other: list[bytes] = []
    extend_chain(one, list(range(40)), 40)
    extend_chain(other, [99, *range(1, 40)], 40)
    assert len(one) == 2
    assert not set(one) & set(other)
    assert pages_for(0) == 0
    assert pages_for(17) == 2
