"""Steps in memory that the ranks' processes share: rank 0 writes one, the others read its arrays in
place. There is a slot for each step that may be under way, with room for the largest one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from kvline_server.ipc.sampling_params import MAX_BIASES
from kvline_server.kernels.layout import Draws, Layout
from kvline_server.kernels.routing import Played
from kvline_server.memory.pages import pages_for
from kvline_server.worker.step import Edits, Step

_I8, _I4, _F4, _U8 = np.int64, np.int32, np.float32, np.uint64
# Of a step's arrays, in the order of `_arrays`, then of each of its edits.
_TYPES = (_I8, _I4, _I4, _I4, _I4, _I4, _I8, *[_I8] * 5, _F4, _I4, _F4, _F4, _U8, _I8, _I8)
_EDIT = (_I8, _I8, _F4, _F4)
_EDITS = 2  # at most: penalties and biases
_NUMBERS = 5  # that are no arrays, before the lengths of the arrays
_HEAD = 8 * (_NUMBERS + len(_TYPES) + _EDITS * len(_EDIT))
_PAGE = mmap.PAGESIZE
_LINE = 8  # int64 in a cache line: readers do not share one


def step_bytes(rows: int, running: int, length: int, vocabulary: int, ranks: int) -> int:
    """Room for any step of so many rows, with `running` sequences of up to `length` tokens. The
    stress has as many edits for each rank. What no step touches takes no memory."""
    pages = running * pages_for(length)
    edits = running * (min(ranks * length, vocabulary) + min(ranks * MAX_BIASES, vocabulary))
    each_row = sum(np.dtype(kind).itemsize for kind in _TYPES) + 8 * len(_TYPES)
    return _HEAD + (rows + running + 1) * each_row + 4 * pages + 24 * edits


def write(into: memoryview, step: Step) -> None:
    """Raises ValueError where there is no room."""
    arrays = _arrays(step)
    head = np.frombuffer(into, _I8, _HEAD // 8)
    numbers = step.layout.decodes, step.scored_top, step.listed_top, step.routing, len(step.edits)
    head[:_NUMBERS] = numbers
    head[_NUMBERS : _NUMBERS + len(arrays)] = [len(array) for array in arrays]
    at = _HEAD
    for array, kind in zip(arrays, _kinds(len(step.edits)), strict=True):
        np.frombuffer(into, kind, len(array), at)[:] = array
        at += _size(len(array), kind)


def read(source: memoryview) -> Step:
    """The arrays are those of the memory."""
    head = np.frombuffer(source, _I8, _HEAD // 8)
    decodes, scored_top, listed_top, routing, edits = head[:_NUMBERS].tolist()
    kinds = _kinds(edits)
    found: list[np.ndarray] = []
    at = _HEAD
    for count, kind in zip(head[_NUMBERS : _NUMBERS + len(kinds)].tolist(), kinds, strict=True):
        found.append(np.frombuffer(source, kind, count, at))
        at += _size(count, kind)
    arrays = iter(found)

    def take(count: int) -> list[np.ndarray]:
        return [next(arrays) for _ in range(count)]

    (tokens,) = take(1)
    layout = Layout(decodes, *take(6))
    pending_rows, pending_slots, wanted, targets, sampled_slots = take(5)
    draws = Draws(*take(5))
    listed, cleared = take(2)
    return Step(
        tokens=tokens,
        layout=layout,
        pending_rows=pending_rows,
        pending_slots=pending_slots,
        wanted=wanted,
        targets=targets,
        scored_top=scored_top,
        sampled_slots=sampled_slots,
        draws=draws,
        edits=tuple(Edits(*take(len(_EDIT))) for _ in range(edits)),
        listed=listed,
        listed_top=listed_top,
        cleared=cleared,
        routing=Played(routing),
    )


def _arrays(step: Step) -> list[np.ndarray]:
    x, d = step.layout, step.draws
    arrays = [step.tokens, x.row_starts, x.lengths, x.page_starts, x.pages, x.positions, x.slots]
    arrays += [step.pending_rows, step.pending_slots, step.wanted, step.targets]
    arrays += [step.sampled_slots, d.temperatures, d.top_k, d.top_p, d.min_p, d.keys]
    arrays += [step.listed, step.cleared]
    for each in step.edits:
        arrays += [each.rows, each.tokens, each.factors, each.subtracted]
    return arrays


def _kinds(edits: int) -> tuple[type, ...]:
    return _TYPES + _EDIT * edits


def _size(count: int, kind: type) -> int:
    """Bytes, so that the next array is aligned."""
    return -(-count * np.dtype(kind).itemsize // 8) * 8


class Steps:
    """The slots, of the writer or of one reader. A slot is written again once every reader has
    launched its step; each counts its own."""

    def __init__(self, file: int, step_size: int, slots: int, readers: int) -> None:
        """All with the same figures; `file` is a memfd, which may be empty."""
        self._slot = -(-step_size // _PAGE) * _PAGE
        counts = -(-8 * _LINE * readers // _PAGE) * _PAGE
        size = counts + slots * self._slot
        os.ftruncate(file, size)
        self._mapped, self._start = mmap.mmap(file, size), counts
        memory = memoryview(self._mapped)
        self._counts = np.frombuffer(memory, _I8, _LINE * readers)[::_LINE]
        self._slots = [
            memory[start : start + self._slot] for start in range(counts, size, self._slot)
        ]
        self._written = 0

    def write(self, step: Step, wait: Callable[[], None]) -> int:
        """Calls `wait`, again and again, while a reader still needs the slot. -> the slot"""
        while self._counts.min() <= self._written - len(self._slots):
            wait()
        slot = self._written % len(self._slots)
        write(self._slots[slot], step)
        self._written += 1
        return slot

    def read(self, slot: int) -> Step:
        return read(self._slots[slot])

    def trim(self) -> None:
        """The writer's: gives back the memory of all slots, unless a reader still needs one."""
        if self._counts.min() == self._written:
            self._mapped.madvise(mmap.MADV_REMOVE, self._start)

    def has_read(self, reader: int) -> None:
        self._counts[reader] += 1
