"""Draft tokens change how many steps an answer takes, and nothing else: every option of a request
gives what plain decoding gives, from the same seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from drafted import PAGES, RARE, equal


@pytest.mark.parametrize(
    ("model", "pages", "depth"),
    [*itertools.product(["qwen2"], PAGES, [0, 1]), ("gemma3", min(PAGES), 1)],
)
def test_drafts_change_no_output(
    make_model: Callable[..., Path], model: str, pages: int, depth: int
) -> None:
    """With windows too. Some sequences are preempted while their drafts are in a step.
    `python tests/server/drafted.py` plays 2,000."""
    found = equal(make_model(model), pages, depth, 50)
    assert found.different <= 1 + found.tokens // RARE
    assert found.accepted > 0.1 * found.tokens and found.drafted > found.accepted
