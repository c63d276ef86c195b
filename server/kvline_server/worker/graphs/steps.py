"""Whole steps as CUDA graphs: decodes alone, mixers inside, one graph a row count. To attention
each row is a sequence, so that graphs do not depend on how many draft tokens each decode has; with
recurrent layers, whose state goes on from row to row, they are for steps without any.

A GPU runs the kernels of few rows faster than the host launches them, even between attentions
alone. All that a graph reads is at fixed addresses: one copy from pinned memory brings a step's
inputs, and attention is planned into a fixed workspace. Padding rows attend to the dummy page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvline_contract.launch import MAX_DRAFT_TOKENS
from kvline_server.kernels.attention import PageTables, SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.layout import GroupLayout
from kvline_server.kernels.recurrent import DUMMY
from kvline_server.kernels.row_counts import captured, padded
from kvline_server.memory.groups import GroupedArena, Memory, pages_at_most
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.model.decoder import Decoder
from kvline_server.worker.graphs.pool import GraphPool
from kvline_server.worker.step import Step

MAX_DECODES = 1024  # of more, the host launches segments faster than a GPU runs them
UNREAD = -1  # for a row whose input token the host has, in place of its request index


def most_rows(decode_rows: int) -> int:
    """Rows of the largest graph for steps of so many, which may be more than these."""
    return padded(min(decode_rows, MAX_DECODES))


class _Views:
    """Of a buffer, one after the other."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.at = buffer, 0

    def next(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        start, size = self.at, count * dtype.itemsize
        self.at += -(-size // 16) * 16
        return self.buffer[start : start + size].view(dtype)


class _GroupInputs:
    """Of a group of layers, its pages apart."""

    def __init__(self, views: _Views, rows: int) -> None:
        self.slots = views.next(torch.int64, rows)
        self.page_starts = views.next(torch.int32, rows + 1)
        self.last_page = views.next(torch.int32, rows)
        self.pages = self.slots[:0].view(torch.int32)
        self.at = 0  # of the pages in the buffer


class _Inputs:
    """A step's inputs as views of one buffer, on the host or on the device; the pages come last, so
    that one copy of what is used brings all, and one more for each group but the first."""

    def __init__(self, rows: int, pages: list[int], **options: Any) -> None:
        """For `rows` sequences with so many pages in each group; `options` of torch.zeros."""
        fixed = rows * (8 + 8 + 8 + 8 + 4 + 4 + len(pages) * (8 + 4 + 4)) + 256 * (1 + len(pages))
        size = fixed + sum(4 * count + 16 for count in pages)
        self.buffer = torch.zeros(size, dtype=torch.uint8, **options)
        views = _Views(self.buffer)
        self.given = views.next(torch.int32, 2)  # sequences, as others are padding, and a Played
        self.tokens = views.next(torch.int64, rows)
        self.unread = views.next(
            torch.int64, rows
        )  # whose last token it is, by request index, or UNREAD
        self.positions = views.next(torch.int32, rows)
        self.written, self.read = (views.next(torch.int64, rows) for _ in range(2))  # states' slots
        self.row_starts = views.next(torch.int32, rows + 1)
        self.groups = [_GroupInputs(views, rows) for _ in pages]
        for group, count in zip(self.groups, pages, strict=True):
            group.at, group.pages = views.at, views.next(torch.int32, count)


class WholeSteps:
    def __init__(
        self,
        decoder: Decoder,
        plan: Callable[[PageTables, int], Any],
        arena: GroupedArena,
        last_tokens: torch.Tensor,
        decode_rows: int,
        longest: int,
        pool: GraphPool,
    ) -> None:
        """As Graphs."""
        self.decoder = decoder
        self.plan_in_place = plan
        self.last_tokens = last_tokens
        self.max_rows = rows = most_rows(decode_rows)
        device, depth = decoder.kernels.device, decoder.kernels.depth
        pages = [rows * _most_pages(window, longest) for window in decoder.windows]
        self.device = _Inputs(rows, pages, device=device)
        # One more than there are steps in flight: a copy reads one while the next is written.
        self.stagings = [_Inputs(rows, pages, pin_memory=True) for _ in range(depth + 1)]
        self.turn = 0
        self.every = torch.arange(rows, device=device)
        hidden = (rows, decoder.config.hidden)
        self.hidden = torch.zeros(hidden, dtype=decoder.kernels.dtype, device=device)
        self._pool = pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._capture_all(arena.layers())

    def fits(self, step: Step) -> bool:
        """Whether it is one of decodes alone, which are all sampled."""
        rows, layout = len(step.tokens), step.layout
        if layout.states is not None and rows != layout.decodes:
            return False
        return rows <= self.max_rows and rows == layout.decode_rows == len(step.sampled_requests)

    def run(self, step: Step) -> torch.Tensor:
        """Graphs.run, of a step that fits; logits_indices are all its rows."""
        rows = len(step.tokens)
        self._place(step, padded(rows))
        self._pool.replay(self._graphs[padded(rows)])
        return self.hidden[:rows]

    def _place(self, step: Step, count: int) -> None:
        """Copies the inputs and plans attention, padded to so many rows."""
        layout, rows = step.layout.apart(), len(step.tokens)
        self.turn = (self.turn + 1) % len(self.stagings)
        host = self.stagings[self.turn]
        host.given.numpy()[:] = rows, step.routing
        host.tokens.numpy()[:count] = _with_pads(step.tokens, count, 0)
        host.positions.numpy()[:count] = _with_pads(layout.positions, count, 0)
        unread = host.unread.numpy()[:count]
        unread.fill(UNREAD)
        unread[step.pending_rows] = step.pending_requests
        if (states := layout.states) is not None:
            assert states.snapshots is None  # of prompts
            host.written.numpy()[:count] = _with_pads(states.slots, count, DUMMY)
            host.read.numpy()[:count] = _with_pads(states.sources, count, DUMMY)
        row_starts = np.arange(count + 1, dtype=np.int32)
        host.row_starts.numpy()[: count + 1] = row_starts
        pairs = list(zip(host.groups, layout.groups, strict=True))
        placed = [_place_group(into, group, row_starts) for into, group in pairs]
        start = 0
        for into, (page_starts, _) in zip(host.groups, placed, strict=True):
            end = into.at + 4 * int(page_starts[-1])
            self.device.buffer[start:end].copy_(host.buffer[start:end], non_blocking=True)
            start = into.at + into.pages.nbytes
        for index, (page_starts, lengths) in enumerate(placed):
            self._plan(index, row_starts, page_starts, lengths)

    def _plan(
        self, index: int, row_starts: np.ndarray, page_starts: np.ndarray, lengths: np.ndarray
    ) -> Any:
        rows, device = len(lengths), self.device
        group = device.groups[index]
        tables = PageTables(
            row_starts=row_starts,
            page_starts=page_starts,
            lengths=lengths,
            device_row_starts=device.row_starts[: rows + 1],
            device_page_starts=group.page_starts[: rows + 1],
            pages=group.pages,
            last_page=group.last_page[:rows],
        )
        return self.plan_in_place(tables, self.decoder.windows[index])

    def _capture_all(self, memories: Sequence[Memory]) -> None:
        with self._pool.stream():
            for rows in reversed(captured(self.max_rows)):
                starts = np.arange(rows + 1, dtype=np.int32)
                self.device.unread.fill_(UNREAD)
                self.device.given[:1].fill_(rows)
                groups = self.device.groups
                for into in (self.device.row_starts, *(each.page_starts for each in groups)):
                    into[: rows + 1].copy_(torch.from_numpy(starts))
                plans = []
                for index, group in enumerate(groups):
                    group.last_page.fill_(1)
                    ones = np.ones(rows, dtype=np.int32)
                    plans.append(self._plan(index, starts, starts, ones))
                if self.decoder.config.recurrent is not None:
                    plan = self.decoder.kernels.recurrent.plan_in_place
                    assert plan is not None, "without it the worker captures nothing"
                    plans.append(plan(self.device.written[:rows], self.device.read[:rows]))
                self._run(rows, memories, plans)
                piece = partial(self._run, rows, memories, plans)
                (self._graphs[rows],) = self._pool.capture([piece])

    def _run(self, rows: int, memories: Sequence[Memory], plans: list[Any]) -> None:
        inputs = self.device
        unread = inputs.unread[:rows]
        last = self.last_tokens[unread.clamp(min=0)]
        tokens = torch.where(unread == UNREAD, inputs.tokens[:rows], last)
        positions = inputs.positions[:rows]
        mappings = [SlotMapping(positions, group.slots[:rows]) for group in inputs.groups]
        every = self.every[:rows]
        given = Given(rows, on_device=inputs.given)
        made = self.decoder.forward(tokens, mappings, memories, plans, every, given)
        self.hidden[:rows].copy_(made)


def _most_pages(window: int, longest: int) -> int:
    """Of a row's table, which has all that its sequence keeps for a decode with draft tokens."""
    return pages_at_most(window, 1 + MAX_DRAFT_TOKENS) if window else pages_for(longest)


def _place_group(
    into: _GroupInputs, group: GroupLayout, row_starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Padded to as many sequences as `row_starts` has. -> page starts and lengths"""
    count, rows, pages = len(row_starts) - 1, len(group.lengths), len(group.pages)
    page_starts = row_starts - rows + pages
    page_starts[: rows + 1] = group.page_starts
    lengths = _with_pads(group.lengths, count, 1)
    into.slots.numpy()[:count] = _with_pads(group.slots, count, DUMMY_PAGE * PAGE_SIZE)
    into.page_starts.numpy()[: count + 1] = page_starts
    into.last_page.numpy()[:count] = (lengths - 1) % PAGE_SIZE + 1
    used = pages + count - rows
    into.pages.numpy()[:used] = _with_pads(group.pages, used, DUMMY_PAGE)
    return page_starts, lengths


def _with_pads(values: np.ndarray, size: int, value: int) -> np.ndarray:
    out = np.full(size, value, dtype=values.dtype)
    out[: len(values)] = values
    return out
