"""Steps in memory that the ranks' processes share: rank 0 writes one, the others read its arrays in
place. There is a buffer for each step that may be under way, with room for the largest one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from kvline_server.ipc.sampling_params import MAX_BIASES
from kvline_server.kernels.layout import GroupLayout
from kvline_server.memory.pages import pages_for
from kvline_server.parallel.record import WORD, Record
from kvline_server.worker.step import Constraints, LogitsEdits, Step, mask_words

_STEP, _GROUP, _LOGITS_EDITS = Record(Step), Record(GroupLayout), Record(LogitsEdits)
_CONSTRAINTS = Record(Constraints)
_MASK_WORD = 4  # bytes
_PAGE = mmap.PAGESIZE
_LINE = 8  # int64 in a cache line: readers do not share one


def step_bytes(
    rows: int, running: int, length: int, vocabulary: int, ranks: int, groups: int
) -> int:
    """Room for any step of so many rows, with `running` sequences of up to `length` tokens, which
    have pages in so many groups of layers. The stress has as many edits for each rank. What no step
    touches takes no memory."""
    most = rows + running + 1  # entries of each array but those of pages and edits
    pages = running * pages_for(length)
    penalties, biases = (running * min(ranks * n, vocabulary) for n in (length, MAX_BIASES))
    of_groups = groups * (_GROUP.size(most) + WORD * pages)
    masks = most * mask_words(vocabulary) * _MASK_WORD
    edits = _LOGITS_EDITS.size(penalties) + _LOGITS_EDITS.size(biases)
    late = _CONSTRAINTS.size(0) + WORD  # a step that is written without them has them behind it
    return _STEP.size(most) + of_groups + edits + masks + late


class Steps:
    """The buffers, of the writer or of one reader. A buffer is written again once every reader has
    launched its step; each counts its own."""

    def __init__(self, file: int, step_size: int, buffers: int, readers: int) -> None:
        """All with the same figures; `file` is a memfd, which may be empty."""
        self._buffer_bytes = -(-step_size // _PAGE) * _PAGE
        counts = -(-8 * _LINE * readers // _PAGE) * _PAGE
        size = counts + buffers * self._buffer_bytes
        os.ftruncate(file, size)
        self._mapped, self._start = mmap.mmap(file, size), counts
        memory = memoryview(self._mapped)
        self._counts = np.frombuffer(memory, np.int64, _LINE * readers)[::_LINE]
        self._buffers = [
            memory[start : start + self._buffer_bytes]
            for start in range(counts, size, self._buffer_bytes)
        ]
        self._written = 0
        self._end = 0  # of the last step, in its buffer

    def write(self, step: Step, wait: Callable[[], None]) -> int:
        """Calls `wait`, again and again, while a reader still needs the buffer. -> the buffer"""
        while self._counts.min() <= self._written - len(self._buffers):
            wait()
        buffer = self._written % len(self._buffers)
        self._end = _STEP.write(self._buffers[buffer], step)
        self._written += 1
        return buffer

    def constrain(self, constraints: Constraints) -> int:
        """Writes them behind the last step. -> their place in its buffer"""
        buffer = self._buffers[(self._written - 1) % len(self._buffers)]
        _CONSTRAINTS.write(buffer[self._end :], constraints)
        return self._end

    def constraints(self, buffer: int, at: int) -> Constraints:
        return _CONSTRAINTS.read(self._buffers[buffer][at:])

    def read(self, buffer: int) -> Step:
        return _STEP.read(self._buffers[buffer])

    def trim(self) -> None:
        """The writer's: gives back the memory of all buffers, unless a reader still needs one."""
        if self._counts.min() == self._written:
            self._mapped.madvise(mmap.MADV_REMOVE, self._start)

    def has_read(self, reader: int) -> None:
        self._counts[reader] += 1
