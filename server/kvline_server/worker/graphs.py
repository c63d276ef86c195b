"""Piecewise CUDA graphs: the decoder's segments between attention calls, one set a row count.

Only attention depends on which sequence a row belongs to, so it runs between the graphs, and one
set serves one request or five hundred. LM head, logprobs and sampling are not captured. Padding
rows write to the dummy page.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvline_server.kernels import row_counts
from kvline_server.kernels.interface import SlotMapping
from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer
from kvline_server.model.decoder import Decoder, LayerState


@contextmanager
def capture_stream() -> Iterator[None]:
    """A stream of its own, as captures need, after and before all other work. No garbage is
    collected meanwhile: a graph among it would be freed, which ends a capture with an error."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream), torch.inference_mode():
            yield
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)


def captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Lazy initialisation is not allowed in a capture: the work must have run before."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


class GraphSegments:
    def __init__(self, decoder: Decoder, cache: list[KVLayer], max_rows: int) -> None:
        c, kernels = decoder.config, decoder.kernels
        self.decoder = decoder
        self.queries = c.heads
        fused = (max_rows, c.heads + 2 * c.kv_heads, c.head_dim)
        device, dtype = kernels.device, kernels.dtype
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.mapping = SlotMapping(
            torch.zeros(max_rows, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
        )
        # For a mixture of experts: rows of a step that are no padding, and a Played.
        self.given = torch.tensor([max_rows, 0], dtype=torch.int32, device=device)
        residual = torch.zeros((max_rows, c.hidden), dtype=dtype, device=device)
        self.state = LayerState(residual, torch.zeros(fused, dtype=dtype, device=device))
        width = c.heads * c.head_dim
        self.attended = torch.zeros((max_rows, width), dtype=dtype, device=device)
        # The last segment runs for the wanted rows alone. Its inputs reuse buffers that are free by
        # then: the heads, and the hidden states that it overwrites.
        self.picked = self.state.heads.view(-1)[: max_rows * width].view(max_rows, width)
        self.hidden = torch.zeros_like(residual)
        self.pool = torch.cuda.graph_pool_handle()
        self.max_rows = max_rows
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._skipped = False
        self._capture_all(cache)

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Within it steps run attention and no graph: graphs have their memory, and would wait for
        other ranks."""
        self._skipped = True
        try:
            yield
        finally:
            self._skipped = False

    def step(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        cache: list[KVLayer],
        layout: Layout,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Decoder.step by graph replay."""
        rows = len(token_ids)
        count = self._padded(rows)
        plan = self.decoder.kernels.plan(layout)
        self._place(token_ids, mapping, count)
        graphs = self._graphs[count]
        queries, out = self.state.heads[:rows, : self.queries], self.attended[:rows]
        for index, layer in enumerate(cache):
            self._replay(graphs[index])
            self.decoder.attend(index, queries, layer, plan, out)
        return self._finish(rows, wanted)

    def _finish(self, rows: int, wanted: torch.Tensor) -> torch.Tensor:
        """Runs the last segment, padded from the number of wanted rows."""
        count = len(wanted)
        if count:
            torch.index_select(self.attended[:rows], 0, wanted, out=self.picked[:count])
            torch.index_select(self.state.residual[:rows], 0, wanted, out=self.hidden[:count])
            self._give(count)
            self._replay(self._graphs[self._padded(count)][-1])
        return self.hidden[:count]

    def _padded(self, rows: int) -> int:
        return min(row_counts.padded(rows), self.max_rows)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if not self._skipped:
            graph.replay()

    def _give(self, rows: int) -> None:
        if self.decoder.config.experts is not None:
            self.given[:1].fill_(rows)
            self.given[1:].fill_(self.decoder.kernels.routing)

    def _place(self, token_ids: torch.Tensor, mapping: SlotMapping, count: int) -> None:
        rows = len(token_ids)
        self._give(rows)
        self.ids[:rows].copy_(token_ids)
        self.mapping.positions[:rows].copy_(mapping.positions)
        self.mapping.slots[:rows].copy_(mapping.slots)
        if rows < count:
            self.mapping.slots[rows:count].zero_()
            self.mapping.positions[rows:count].zero_()

    def _capture_all(self, cache: list[KVLayer]) -> None:
        """Captures the largest count first, so that the smaller ones reuse its memory pool."""
        with capture_stream():
            for rows in reversed(row_counts.captured(self.max_rows)):
                for segment in (0, 1, len(cache)):
                    self._run(segment, rows, cache)
                torch.cuda.synchronize()
                self._graphs[rows] = [
                    captured(partial(self._run, segment, rows, cache), self.pool)
                    for segment in range(len(cache) + 1)
                ]

    def _run(self, segment: int, rows: int, cache: list[KVLayer]) -> None:
        """Segment 0 ends at the first attention; segment i is between attentions i - 1 and i."""
        mapping = SlotMapping(self.mapping.positions[:rows], self.mapping.slots[:rows])
        state = LayerState(self.state.residual[:rows], self.state.heads[:rows])
        if segment == 0:
            made = self.decoder.start(self.ids[:rows], mapping, cache[0], state.heads)
            state.residual.copy_(made.residual)
        elif segment < len(cache):
            attended, kv = self.attended[:rows], cache[segment]
            into, given = state.heads, self.given
            self.decoder.between(segment - 1, attended, state, mapping, kv, into, given)
        else:
            hidden = self.hidden[:rows]
            hidden.copy_(self.decoder.finish(self.picked[:rows], hidden, self.given))
