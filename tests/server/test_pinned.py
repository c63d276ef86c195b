"""What goes to a GPU in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvline_server.kernels.pinned import pack


def test_arrays_are_packed_in_order_of_rows_whatever_their_strides() -> None:
    """One column of many, of each image; a table that numpy keeps by columns."""
    table = np.arange(12, dtype=np.int64).reshape(3, 4)
    every: list[NDArray[Any]] = [table[:, 1], np.asfortranarray(table), table[::2]]
    every += [np.zeros(0, np.int32), table]
    starts = np.cumsum([0, *(each.nbytes for each in every)]).tolist()[:-1]
    host = np.full(sum(each.nbytes for each in every), 255, np.uint8)
    pack(every, starts, host)
    for each, start in zip(every, starts, strict=True):
        found = host[start : start + each.nbytes].view(each.dtype).reshape(each.shape)
        assert np.array_equal(found, each)
