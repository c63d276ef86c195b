"""Images that an HTTP process sent, as the engine gets them; what is none of its memory or prompt
ends the engine with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvline_server.engine_process.images import pictures
from kvline_server.errors import InvalidFrame
from kvline_server.ipc.messages import SentImage, Submit
from kvline_server.ipc.pixels import PAGE, Places, SharedPixels, create
from kvline_server.ipc.sampling_params import SamplingParams

IMAGE = SentImage(3, 2, 4, b"digest", PAGE, 8, 16)


@pytest.fixture
def places() -> Iterator[tuple[Places, SharedPixels]]:
    file = create(8 * PAGE)
    yield Places(file), SharedPixels(file)
    os.close(file)


def submit(*images: SentImage, tokens: int = 40) -> Submit:
    return Submit(1, list(range(tokens)), SamplingParams(1), list(images))


def test_pixels_are_read_in_place_and_positions_are_those_of_the_prompt(
    places: tuple[Places, SharedPixels],
) -> None:
    ours, theirs = places
    assert [ours.allocate(PAGE), ours.allocate(PAGE)] == [0, PAGE]
    drawn = np.arange(8 * 16 * 3, dtype=np.uint8).reshape(8, 16, 3)
    ours.write(PAGE, drawn)
    other = msgspec.structs.replace(IMAGE, start=11, rows=3, columns=3, offset=0)
    made = pictures(submit(IMAGE, other), theirs, axes=True)
    first, second = made.images
    assert (first.start, first.tokens, first.digest) == (3, 8, b"digest")
    assert (second.start, second.end) == (11, 20)
    assert np.array_equal(first.pixels, drawn) and not first.pixels.flags.owndata
    assert made.axes is not None and made.axes.dtype == np.int64
    assert made.axes[:, 2:5].tolist() == [[2, 3, 3], [2, 3, 3], [2, 3, 4]]
    assert made.axes[:, 10:12].tolist() == [[3, 7], [4, 7], [6, 7]]
    assert made.axes[:, 20].tolist() == [10] * 3 and made.shift == -10


def test_without_axes_positions_are_those_of_text(places: tuple[Places, SharedPixels]) -> None:
    made = pictures(submit(IMAGE), places[1], axes=False)
    assert (made.axes, made.shift) == (None, 0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"start": -1}, "an image of 2 x 4 at -1"),
        ({"start": 33}, "ends at 41 of 40 tokens"),
        ({"rows": 0}, "an image of 0 x 4"),
        ({"rows": -2, "columns": -4}, "an image of -2 x -4"),
        ({"rows": 1 << 40}, "of 40 tokens"),
        ({"offset": 8 * PAGE}, "outside of the"),
        ({"offset": -PAGE}, "outside of the"),
        ({"height": 0}, "outside of the"),
        ({"width": 1 << 40}, "outside of the"),
    ],
)
def test_an_image_outside_is_no_frame(
    places: tuple[Places, SharedPixels], changed: dict[str, int], named: str
) -> None:
    sent = submit(msgspec.structs.replace(IMAGE, **changed))
    for axes in (True, False):
        with pytest.raises(InvalidFrame, match=named):
            pictures(sent, places[1], axes)


def test_images_that_overlap_are_no_frame(places: tuple[Places, SharedPixels]) -> None:
    second = msgspec.structs.replace(IMAGE, start=10)
    with pytest.raises(InvalidFrame, match="an image of 2 x 4 at 10"):
        pictures(submit(IMAGE, second), places[1], axes=True)


def test_an_engine_without_the_memory_refuses_them() -> None:
    with pytest.raises(InvalidFrame, match="shares no memory"):
        pictures(submit(IMAGE), None, axes=True)
