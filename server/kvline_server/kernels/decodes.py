"""A decode step as one CUDA graph, attention included, for each bucket of sequences.

No gap between pieces, one launch on the host. Pads are sequences of one token in the dummy page.
Steps with a prompt in them go piece by piece (kernels/pieces.py), whose tensors these share.
"""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.kernels.flashinfer_attention import PagedAttention, Planned, Table
from kvline_server.kernels.interface import KVLayer, Where
from kvline_server.kernels.layout import Layout
from kvline_server.kernels.pieces import Pieces, bucket_for, buckets
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE

MOST = 512  # sequences; beyond, a step is long enough to hide its pieces


class Decodes:
    def __init__(
        self, pieces: Pieces, attention: PagedAttention, cache: list[KVLayer], max_pages: int
    ) -> None:
        self.pieces = pieces
        self.attention = attention
        self.replayed = 0
        most = min(MOST, pieces.sizes[-1])
        self.sizes = buckets(most)
        device = pieces.ids.device
        self._row_starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._page_starts = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._last_page = torch.ones(most, dtype=torch.int32, device=device)
        self._pages = torch.zeros(max_pages + MOST, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[int]]] = {}
        self._capture_all(cache)

    def step(
        self, token_ids: torch.Tensor, where: Where, cache: list[KVLayer], layout: Layout
    ) -> torch.Tensor:
        """Decoder.step: one graph for a step that only decodes, else by pieces."""
        rows = len(token_ids)
        # A probe's tables repeat the few pages there are, and can be longer than any real one.
        fits = layout.decodes == layout.rows and len(layout.pages) + MOST <= len(self._pages)
        bucket = bucket_for(rows, self.sizes) if fits else None
        if bucket is None:
            return self.pieces.step(token_ids, where, cache, layout)
        graph, info = self._graphs[bucket]
        if list(self._plan(layout, bucket).info) != info:  # not what was captured: do not guess
            return self.pieces.step(token_ids, where, cache, layout)
        self.replayed += 1
        self.pieces.place(token_ids, where, bucket)
        graph.replay()
        return self.pieces.hidden[:rows]

    def _plan(self, layout: Layout, bucket: int) -> Planned:
        pads = bucket - layout.sequences
        ends = layout.page_starts[-1] + np.arange(1, pads + 1, dtype=np.int32)
        lengths = np.concatenate((layout.lengths, np.ones(pads, np.int32)))
        page_starts = np.concatenate((layout.page_starts, ends))
        pages = np.concatenate((layout.pages, np.full(pads, DUMMY_PAGE, np.int32)))
        last_page = (lengths - 1) % PAGE_SIZE + 1
        there = self.pieces.decoder.kernels.upload(page_starts, last_page, pages)
        self._page_starts[: bucket + 1].copy_(there[0])
        self._last_page[:bucket].copy_(there[1])
        self._pages[: len(pages)].copy_(there[2])
        return self.attention.plan(
            Table(
                row_starts=np.arange(bucket + 1, dtype=np.int32),
                page_starts=page_starts,
                lengths=lengths,
                device_row_starts=self._row_starts[: bucket + 1],
                device_page_starts=self._page_starts[: bucket + 1],
                pages=self._pages,
                last_page=self._last_page[:bucket],
            )
        )

    def _capture_all(self, cache: list[KVLayer]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for rows in reversed(self.sizes):
                planned = self._plan(_nobody(), rows)
                self._run(rows, cache, planned)  # what is lazy must not be met in a capture
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self.pieces.pool, capture_error_mode="thread_local")
                try:
                    self._run(rows, cache, planned)
                finally:
                    graph.capture_end()
                self._graphs[rows] = graph, list(planned.info)
        torch.cuda.current_stream().wait_stream(stream)

    def _run(self, rows: int, cache: list[KVLayer], planned: Planned) -> None:
        pieces = self.pieces
        queries = pieces.state.heads[:rows, : pieces.queries]
        out = pieces.attended[:rows].view(queries.shape)
        pieces.run(0, rows, cache)
        for index, layer in enumerate(cache):
            self.attention.run(queries, layer, planned, out)
            pieces.run(index + 1, rows, cache)


def _nobody() -> Layout:
    none = np.zeros(0, np.int32)
    start = np.zeros(1, np.int32)
    return Layout(0, start, none, start, none, none, np.zeros(0, np.int64))
