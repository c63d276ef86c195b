"""The encoder's cache as bookkeeping: rows are neither lost nor given twice, and who is first gets
what it needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.memory.encoded import EncodedRows

SIZES = {bytes([n]): 1 + n for n in range(8)}
IMAGES = st.lists(st.sampled_from(sorted(SIZES)), max_size=8, unique=True)
CALLS = st.lists(st.tuples(IMAGES, IMAGES, IMAGES), max_size=20)


def owners(cache: EncodedRows) -> dict[int, bytes]:
    """By row. No row has two."""
    found = [(int(row), each) for each in SIZES for row in rows_of(cache, each)]
    assert len(dict(found)) == len(found)
    return dict(found)


def rows_of(cache: EncodedRows, digest: bytes) -> np.ndarray:
    rows = cache.rows(digest)
    return np.empty(0, np.int64) if rows is None else rows


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 30), CALLS)
def test_rows_have_one_owner_and_the_first_images_have_theirs(
    total: int, calls: list[tuple[list[bytes], list[bytes], list[bytes]]]
) -> None:
    cache = EncodedRows(total)
    written: set[bytes] = set()
    for wanted, encoded, failed in calls:
        before = {each: rows_of(cache, each).tolist() for each in SIZES}
        held = cache.hold([(each, SIZES[each]) for each in wanted])
        assert held == wanted[: len(held)]
        taken = sum(SIZES[each] for each in held)
        assert taken <= total
        if len(held) < len(wanted):
            assert taken + SIZES[wanted[len(held)]] > total  # all others were evicted in vain
        for each in SIZES:
            if before[each] and len(rows_of(cache, each)):
                assert rows_of(cache, each).tolist() == before[each]
            if not len(rows_of(cache, each)):
                written.discard(each)
            assert cache.ready(each) == (each in written)
        for each in set(encoded) & set(held):
            cache.written(each)
            written.add(each)
        for each in failed:
            cache.drop(each)
            written.discard(each)
        assert len(owners(cache)) + cache.free == total
        assert all(len(rows_of(cache, each)) in (0, SIZES[each]) for each in SIZES)


def test_what_was_not_asked_for_the_longest_goes_first() -> None:
    cache = EncodedRows(9)
    for digest in (b"a", b"b", b"c"):
        assert cache.hold([(digest, 3)]) == [digest]
        cache.written(digest)
    cache.hold([(b"a", 3)])
    assert cache.hold([(b"d", 2)]) == [b"d"]
    assert [cache.ready(each) for each in (b"a", b"b", b"c", b"d")] == [True, False, True, False]
    assert cache.free == 1
