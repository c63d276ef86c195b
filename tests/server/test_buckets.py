"""Which graph a step runs as: one pure function of plain numbers."""

from __future__ import annotations

from kvline_server.engine.scheduler import WAVE
from kvline_server.worker.graphs import bucket_for, buckets


def test_which_bucket_is_a_matter_of_numbers_alone() -> None:
    sizes = buckets(8192)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[-1] == 8192
    assert bucket_for(3, sizes) == 4
    assert bucket_for(8192, sizes) == 8192
    assert all(bucket_for(rows, sizes) == rows for rows in range(WAVE, 8193, WAVE)), "no pads"
    for rows in range(1, 8193):
        bucket = bucket_for(rows, sizes)
        assert rows <= bucket < 2 * rows
