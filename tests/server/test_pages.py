"""Pages: none is ever lost, none is ever in two places, and none that may hold NaN gets another
owner as it is. Invariant 2."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvline_server.engine.request import Sequence
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.pages import DUMMY_PAGE, PagePool, extend_chain, pages_for


def match(pool: PagePool, hashes: list[bytes]) -> list[int]:
    return pool.hold(hashes[: pool.prefix(hashes)])


class Pool(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.clean: set[int] = set()  # pages with nothing but what was confirmed

    @rule(target=held, count=st.integers(0, 5))
    def take(self, count: int) -> list[int]:
        if not self.pool.can_take(count):
            return []
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert DUMMY_PAGE not in pages
        assert set(pages) <= self.clean | set(self.pool.to_clear())
        self.clean -= set(pages)  # they are written to
        return pages

    @rule(pages=held, number=st.integers(0, 20))
    def publish(self, pages: list[int], number: int) -> None:
        for index, page in enumerate(pages):
            if page in self.pool._references:
                self.pool.publish(page, f"{number}-{index}".encode())

    @rule(target=held, number=st.integers(0, 20))
    def match(self, number: int) -> list[int]:
        return match(self.pool, [f"{number}-{i}".encode() for i in range(5)])

    @rule(pages=held)
    def confirm(self, pages: list[int]) -> None:
        self.pool.confirm(pages)
        self.clean |= set(pages)

    @rule(pages=consumes(held))
    def fail(self, pages: list[int]) -> None:
        self.pool.retract(pages)
        self.clean -= set(pages)
        assert not set(self.pool.known(list(self.pool._page_of))) & set(pages)
        self.pool.release(pages)

    @rule(pages=consumes(held), leaves=st.booleans())
    def release(self, pages: list[int], leaves: bool) -> None:
        alone = {page for page in pages if self.pool._references[page] == pages.count(page)}
        self.pool.release(pages)
        if leaves:
            self.pool.abandon(pages)
            known = set(self.pool.known(list(self.pool._page_of)))
            assert not (known & alone) - self.clean

    @rule(pages=consumes(held))
    def drop(self, pages: list[int]) -> None:
        alone = {page for page in pages if self.pool._references[page] == pages.count(page)}
        self.pool.drop(pages)
        assert not set(self.pool.known(list(self.pool._page_of))) & alone

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
    assert match(pool, [b"a", b"b"]) == [pages[0]]
    pool.release([pages[0]])
    assert len(pool.take(3)) == 3
    assert match(pool, [b"a"]) == []


def test_a_page_is_cleared_for_its_next_owner_unless_it_was_confirmed() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert set(pool.to_clear()) == {1, 2}, "sizing has written to them"
    pool.confirm(pages)
    pool.release(pages)
    pages = pool.take(2)
    assert pool.to_clear() == []
    pool.confirm(pages[:1])
    pool.release(pages)
    assert set(pool.take(2)) == set(pages)
    assert pool.to_clear() == pages[1:]


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


def keys(tokens: list[int], extras: dict[int, bytes] | None = None) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, len(tokens), extras or {})
    return chain


def test_no_page_has_the_same_key_under_two_salts() -> None:
    tokens = list(range(64))
    salts = ("", "a", "b", "a" * 256)
    chains = [Sequence(0, tokens, 64, SamplingParams(1, cache_salt=salt)) for salt in salts]
    for one in chains:
        one.extend_chain(32)
        one.extend_chain(64)  # later pages have it from the first one
    by_salt = [one.chain for one in chains]
    assert all(len(set(same)) == len(salts) for same in zip(*by_salt, strict=True))
    assert keys(tokens) == by_salt[0]


EXTRAS = st.dictionaries(st.integers(0, 3), st.sampled_from([b"", b"a", b"b", b"ab"]))


@given(EXTRAS, EXTRAS, st.integers(0, 4))
def test_two_prefixes_share_the_pages_before_the_first_other_extra_part(
    one: dict[int, bytes], other: dict[int, bytes], begun: int
) -> None:
    """Of the same token ids, as two images or two adapters have."""
    tokens = [7] * 64
    differ = [index for index in range(4) if one.get(index) != other.get(index)]
    same = min(differ, default=4)
    a, b = keys(tokens, one), keys(tokens, other)
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])
    continued = a[:begun]
    extend_chain(continued, tokens, 64, one)
    assert continued == a


def test_a_salt_cannot_stand_for_tokens() -> None:
    """Else its client would find the second page of a prompt that is not theirs as the first one,
    with keys and values of other positions."""
    whole = [ord(c) for c in "a page of tokens" * 2]
    first = b"".join(token.to_bytes(4, "little") for token in whole[:16])
    assert keys(whole[16:], {0: first})[0] not in keys(whole)
