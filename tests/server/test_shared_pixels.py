"""Memory for pixels that an HTTP process and the engine share: places never overlap, none is lost,
and what is read is what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.errors import InvalidFrame
from kvline_server.ipc.pixels import PAGE, Places, SharedPixels, create, place_bytes

PAGES = 24
SIDES = st.tuples(st.integers(1, 90), st.integers(1, 90))
CALLS = st.lists(st.one_of(SIDES, st.integers(0, 30)), max_size=60)  # an image, or whose end


@pytest.fixture
def file() -> Iterator[int]:
    file = create(PAGES * PAGE)
    yield file
    os.close(file)


def drawn(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_places_never_overlap_and_none_is_lost(calls: list[tuple[int, int] | int]) -> None:
    file = create(PAGES * PAGE)
    places, engine = Places(file), SharedPixels(file)
    held: dict[int, np.ndarray] = {}
    for number, call in enumerate(calls):
        if isinstance(call, int):
            if held:
                offset = list(held)[call % len(held)]
                places.release(offset)
                del held[offset]
        else:
            pixels = drawn(*call, number)
            found = places.allocate(pixels.nbytes)
            if found is None:
                spans = sorted((each, place_bytes(*held[each].shape[:2])) for each in held)
                ends = [0, *(start + size for start, size in spans)]
                starts = [*(start for start, _ in spans), places.total]
                gaps = [start - end for end, start in zip(ends, starts, strict=True)]
                assert max(gaps) < place_bytes(*call), "a gap was not found"
            else:
                assert found % PAGE == 0 and found not in held
                places.write(found, pixels)
                held[found] = pixels
        assert places.free + places.used == places.total == PAGES * PAGE
        assert places.used == sum(place_bytes(*each.shape[:2]) for each in held.values())
        for offset, pixels in held.items():
            assert np.array_equal(engine.view(offset, *pixels.shape[:2]), pixels)
    for offset in held:
        places.release(offset)
    assert places.allocate(places.total) == 0, "all is one piece again"
    os.close(file)


@pytest.mark.parametrize(
    "place",
    [
        (-PAGE, 1, 1),
        (7, 1, 1),
        (PAGES * PAGE, 1, 1),
        ((PAGES - 1) * PAGE, 32, 43),
        (0, 0, 5),
        (0, 5, -1),
        (0, -5, -5),
        (0, 1 << 40, 1 << 40),
    ],
)
def test_a_place_outside_is_no_frame(file: int, place: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidFrame, match=r"outside of the \d+ bytes"):
        SharedPixels(file).view(*place)


def test_the_last_page_is_inside(file: int) -> None:
    places = Places(file)
    assert places.allocate((PAGES - 1) * PAGE) == 0
    last = places.allocate(PAGE)
    pixels = drawn(1, PAGE // 3, 0)
    assert last is not None
    places.write(last, pixels)
    assert np.array_equal(SharedPixels(file).view(last, 1, PAGE // 3), pixels)
    assert places.allocate(1) is None


def test_the_engine_sees_what_is_written_and_writes_nothing(file: int) -> None:
    places, engine = Places(file), SharedPixels(file)
    offset = places.allocate(12)
    assert offset == 0
    seen = engine.view(0, 2, 2)
    places.write(0, drawn(2, 2, 3))
    assert np.array_equal(seen, drawn(2, 2, 3)), "not a copy"
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1


def test_what_nobody_holds_is_neither_freed_nor_written(file: int) -> None:
    places = Places(file)
    with pytest.raises(InvalidFrame, match="nobody holds"):
        places.release(0)
    assert places.allocate(PAGE) == 0
    with pytest.raises(InvalidFrame, match="a smaller place"):
        places.write(0, drawn(64, 64, 0))
    places.release(0)
    with pytest.raises(InvalidFrame, match="a smaller place"):
        places.write(0, drawn(1, 1, 0))


def test_places_are_given_all_at_once_for_as_few_others_as_need_be(file: int) -> None:
    places = Places(file)
    taken = [places.allocate(PAGE) for _ in range(PAGES)]
    assert taken == [n * PAGE for n in range(PAGES)]
    spare = [n * PAGE for n in (7, 3, 4, 9, 5)]
    two = 2 * PAGE
    assert places.allocate_all([two, two], spare) is None, "3 to 5 are one piece, 7 and 9 single"
    assert places.free == 0 and places.used == places.total, "nothing has changed"
    assert places.allocate_all([two, PAGE], spare) == ([3 * PAGE, 7 * PAGE], spare[:3])
    assert places.used == places.total and places.allocate_all([], spare) == ([], [])
