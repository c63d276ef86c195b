"""What a long build says of itself."""

from __future__ import annotations

import binaries
import pytest


@pytest.mark.parametrize(
    ("took", "done", "text"),
    [
        (60.0, 0, "60 s so far, 0 of 2,000 packages"),  # of none yet, no estimate
        (60.0, 500, "60 s so far, 500 of 2,000 packages, about 3 minutes to go"),
        (240.0, 1990, "240 s so far, 1,990 of 2,000 packages, nearly done"),
        (240.0, 2100, "240 s so far, 2,100 of 2,000 packages, nearly done"),
    ],
)
def test_a_build_says_how_far_it_is_and_how_long_it_may_take(
    took: float, done: int, text: str
) -> None:
    assert binaries.progress(took, done, 2000) == text


def test_a_build_whose_packages_are_not_known_yet_says_that_it_fetches_them() -> None:
    assert binaries.progress(61.0, 0, None) == "61 s so far, fetching modules"


def test_the_time_that_fetching_took_is_none_of_the_compiler_s() -> None:
    text = "200 s so far, 500 of 1,000 packages, about 1 minutes to go"
    assert binaries.progress(200.0, 500, 1000, counted=140.0) == text
    assert binaries.progress(61.0, 0, 0, counted=60.0) == "61 s so far, 0 of 0 packages"
