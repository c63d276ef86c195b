"""Comparisons of two computations of the same numbers: one rank's and several ranks', a batch's and
a single request's, a kernel's and its reference's. Sums in another order differ in their last bits,
and so may whatever is decided by them. Whatever has the same order of sums on both sides is
compared bit by bit instead.

`tolerance` is how far apart the two sides may have the same number, so the order of two candidates
is open within twice as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

TOLERANCE = 1e-5  # of logits and logprobs of tiny models in float32
FLIPPED = 2e-2  # of those behind a number that fp8 has rounded the other way
FEW = 8  # such numbers of a layer


def same_values(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def same_ranking(got: tuple[Any, Any], want: tuple[Any, Any], tolerance: float = TOLERANCE) -> None:
    """Ids and values of the best candidates of each row, best first; `want` may list more."""
    got_ids, got_values, want_ids, want_values = map(np.asarray, (*got, *want))
    count = got_ids.shape[1]
    same_values(got_values, want_values[:, :count], tolerance)
    assert (np.diff(got_values) <= 0).all(), "not in order"
    for row in range(len(got_ids)):
        one, other = (
            dict(zip(ids[row].tolist(), values[row].tolist(), strict=True))
            for ids, values in ((got_ids, got_values), (want_ids, want_values))
        )
        assert len(one) == count, "a candidate twice"
        for here, there in ((one, other), (other, one)):
            last = min(there.values(), default=np.inf)
            for id, value in list(here.items())[:count]:
                # What the other side does not list may only just have been left out.
                least = there[id] if id in there else min(value, last)
                assert abs(value - least) <= tolerance, (row, id, value, least)


def same_ranks(got: Any, chosen: Any, whole: Any, tolerance: float = TOLERANCE) -> None:
    """Ranks from 1 of chosen values, among all values of their rows. [rows], [rows, tokens]"""
    chosen, whole = np.asarray(chosen)[:, None], np.asarray(whole)
    assert (got >= 1 + (whole > chosen + 2 * tolerance).sum(1)).all(), "too good"
    assert (got <= (whole >= chosen - 2 * tolerance).sum(1)).all(), "too bad"


def flips(got: Iterable[Any], want: Iterable[Any]) -> int:
    """Numbers of an fp8 cache, given as bytes layer by layer, that were rounded the other way: few
    of the first layer that differs, each by one step, or none. What is behind it has other inputs
    then."""
    for pair in zip(got, want, strict=True):
        one, other = (
            np.where(made & 0x80, -(made & 0x7F).astype(np.int16), made & 0x7F) for made in pair
        )
        steps = np.abs(one - other)
        if steps.any():
            count = int(np.count_nonzero(steps))
            return count if steps.max() == 1 and count <= FEW else 0
    return 0
