"""Warnings of several ranks: none is lost, and none comes twice."""

from __future__ import annotations

import pytest

from kvline_server.ipc.messages import Progress
from kvline_server.parent.report_keeper import MAX_WARNING, ReportKeeper


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([(0, "a"), (0, "b")], ("a", "b")),
        ([(2, "a"), (1, "b")], ("rank 2: a", "rank 1: b")),
        ([(2, "a"), (2, "a")], ("rank 2: a",)),
        ([(0, "a"), (1, "a"), (2, "a")], ("a",)),
        ([(1, "a"), (0, "b"), (0, "a"), (2, "a")], ("b", "a")),
        ([(1, "a"), (2, "a"), (3, "a")], ("a",)),
        ([(1, "x" * 600)], ("rank 1: " + "x" * MAX_WARNING,)),
    ],
)
def test_a_warning_names_the_rank_that_alone_has_it(
    given: list[tuple[int, str]], shown: tuple[str, ...]
) -> None:
    keeper = ReportKeeper("uid", "pod", "revision")
    new = [keeper.warn(text, rank) for rank, text in given]
    assert keeper.report.warnings == shown
    assert sum(new) == len(shown)


def test_a_warning_of_rank_0_is_part_of_its_progress() -> None:
    keeper = ReportKeeper("uid", "pod", "revision")
    keeper.apply(Progress(warning="a"))
    assert keeper.report.warnings == ("a",)
