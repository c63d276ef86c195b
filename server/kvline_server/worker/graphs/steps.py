"""Whole steps as CUDA graphs: decodes alone, attention inside, one graph a row count.

A GPU runs the kernels of few rows faster than the host launches them, even between attentions
alone. All that a graph reads is at fixed addresses: one copy from pinned memory brings a step's
inputs, and attention is planned into a fixed workspace. Padding rows attend to the dummy page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from kvline_server.kernels.attention import PageTables, SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.row_counts import captured, padded
from kvline_server.memory.arena import Arena, KVLayer
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.model.decoder import Decoder
from kvline_server.worker.graphs.pool import GraphPool
from kvline_server.worker.step import Step

MAX_DECODES = 1024  # of more, the host launches segments faster than a GPU runs them
UNREAD = -1  # for a row whose input token the host has, in place of its slot


def most_rows(slots: int) -> int:
    """Rows of the largest graph for so many sequences at once, which may be more than these."""
    return padded(min(slots, MAX_DECODES))


class _Inputs:
    """A step's inputs as views of one buffer, on the host or on the device; the pages come last,
    so that one copy of what is used brings all."""

    def __init__(self, buffer: torch.Tensor, rows: int) -> None:
        at = 0

        def part(dtype: torch.dtype, count: int) -> torch.Tensor:
            nonlocal at
            start, at = at, at + -(-count * dtype.itemsize // 16) * 16
            return buffer[start : start + count * dtype.itemsize].view(dtype)

        self.buffer = buffer
        self.given = part(torch.int32, 2)  # sequences, as the other rows are padding, and a Played
        self.tokens = part(torch.int64, rows)
        self.unread = part(torch.int64, rows)  # the slot of its last token, or UNREAD
        self.slots = part(torch.int64, rows)
        self.positions = part(torch.int32, rows)
        self.row_starts = part(torch.int32, rows + 1)
        self.page_starts = part(torch.int32, rows + 1)
        self.last_page = part(torch.int32, rows)
        self.head = at
        self.pages = buffer[at:].view(torch.int32)


def _inputs(rows: int, longest: int, **options: Any) -> _Inputs:
    """For `rows` sequences of `longest` tokens; `options` of torch.zeros."""
    head = rows * (3 * 8 + 4 * 4) + 256  # what stands before the pages, and what aligns it
    size = head + 4 * rows * pages_for(longest)
    return _Inputs(torch.zeros(size, dtype=torch.uint8, **options), rows)


class WholeSteps:
    def __init__(
        self,
        decoder: Decoder,
        plan: Callable[[PageTables], Any],
        arena: Arena,
        last_tokens: torch.Tensor,
        longest: int,
        pool: GraphPool,
    ) -> None:
        """As Graphs."""
        self.decoder = decoder
        self.plan_in_place = plan
        self.last_tokens = last_tokens
        self.max_rows = rows = most_rows(len(last_tokens))
        device, depth = decoder.kernels.device, decoder.kernels.depth
        self.device = _inputs(rows, longest, device=device)
        # One more than there are steps in flight: a copy reads one while the next is written.
        self.stagings = [_inputs(rows, longest, pin_memory=True) for _ in range(depth + 1)]
        self.turn = 0
        self.every = torch.arange(rows, device=device)
        hidden = (rows, decoder.config.hidden)
        self.hidden = torch.zeros(hidden, dtype=decoder.kernels.dtype, device=device)
        self._pool = pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._capture_all(arena.layers())

    def fits(self, step: Step) -> bool:
        """Whether it is one of decodes alone, which are all sampled."""
        rows = len(step.tokens)
        return rows <= self.max_rows and rows == step.layout.decodes == len(step.sampled_slots)

    def run(self, step: Step) -> torch.Tensor:
        """Graphs.run, of a step that fits; all its rows are wanted."""
        rows = len(step.tokens)
        self._place(step, padded(rows))
        self._pool.replay(self._graphs[padded(rows)])
        return self.hidden[:rows]

    def _place(self, step: Step, count: int) -> None:
        """Copies the inputs and plans attention, padded to so many rows."""
        layout, rows = step.layout, len(step.tokens)
        self.turn = (self.turn + 1) % len(self.stagings)
        host = self.stagings[self.turn]
        pages = len(layout.pages)
        lengths = _with_pads(layout.lengths, count, 1)
        host.given.numpy()[:] = rows, step.routing
        host.tokens.numpy()[:count] = _with_pads(step.tokens, count, 0)
        host.slots.numpy()[:count] = _with_pads(layout.slots, count, DUMMY_PAGE * PAGE_SIZE)
        host.positions.numpy()[:count] = _with_pads(layout.positions, count, 0)
        unread = host.unread.numpy()[:count]
        unread.fill(UNREAD)
        unread[step.pending_rows] = step.pending_slots
        row_starts = np.arange(count + 1, dtype=np.int32)
        page_starts = row_starts - rows + pages
        page_starts[: rows + 1] = layout.page_starts
        host.row_starts.numpy()[: count + 1] = row_starts
        host.page_starts.numpy()[: count + 1] = page_starts
        host.last_page.numpy()[:count] = (lengths - 1) % PAGE_SIZE + 1
        used = pages + count - rows
        host.pages.numpy()[:used] = _with_pads(layout.pages, used, DUMMY_PAGE)
        end = host.head + 4 * used
        self.device.buffer[:end].copy_(host.buffer[:end], non_blocking=True)
        self._plan(row_starts, page_starts, lengths)

    def _plan(self, row_starts: np.ndarray, page_starts: np.ndarray, lengths: np.ndarray) -> Any:
        rows, device = len(lengths), self.device
        return self.plan_in_place(
            PageTables(
                row_starts=row_starts,
                page_starts=page_starts,
                lengths=lengths,
                device_row_starts=device.row_starts[: rows + 1],
                device_page_starts=device.page_starts[: rows + 1],
                pages=device.pages,
                last_page=device.last_page[:rows],
            )
        )

    def _capture_all(self, cache: list[KVLayer]) -> None:
        with self._pool.stream():
            for rows in reversed(captured(self.max_rows)):
                starts = np.arange(rows + 1, dtype=np.int32)
                self.device.last_page.fill_(1)
                self.device.unread.fill_(UNREAD)
                self.device.given[:1].fill_(rows)
                for into in (self.device.row_starts, self.device.page_starts):
                    into[: rows + 1].copy_(torch.from_numpy(starts))
                plan = self._plan(starts, starts, np.ones(rows, dtype=np.int32))
                self._run(rows, cache, plan)
                self._graphs[rows] = self._pool.capture(partial(self._run, rows, cache, plan))

    def _run(self, rows: int, cache: list[KVLayer], plan: Any) -> None:
        inputs = self.device
        unread = inputs.unread[:rows]
        last = self.last_tokens[unread.clamp(min=0)]
        tokens = torch.where(unread == UNREAD, inputs.tokens[:rows], last)
        mapping = SlotMapping(inputs.positions[:rows], inputs.slots[:rows])
        every = self.every[:rows]
        given = Given(rows, on_device=inputs.given)
        made = self.decoder.forward(tokens, mapping, cache, plan, every, given)
        self.hidden[:rows].copy_(made)


def _with_pads(values: np.ndarray, size: int, value: int) -> np.ndarray:
    out = np.full(size, value, dtype=values.dtype)
    out[: len(values)] = values
    return out
