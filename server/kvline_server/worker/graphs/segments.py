"""Piecewise CUDA graphs: the decoder's segments between attention calls, one set a row count.

Only attention depends on which sequence a row belongs to, so it runs between the graphs, and one
set serves one request or five hundred. LM head, logprobs and sampling are not captured. Padding
rows write to the dummy page.
"""

from __future__ import annotations

from functools import partial

import torch

from kvline_server.kernels import row_counts
from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.routing import Played
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.groups import GroupedArena
from kvline_server.model.decoder import Decoder, LayerState, Mappings
from kvline_server.worker.graphs.pool import GraphPool
from kvline_server.worker.inputs import upload
from kvline_server.worker.step import Step


class Segments:
    def __init__(
        self,
        decoder: Decoder,
        arena: GroupedArena,
        last_tokens: torch.Tensor,
        max_rows: int,
        pool: GraphPool,
    ) -> None:
        """As Graphs."""
        c, kernels = decoder.config, decoder.kernels
        self.decoder, self.arena, self.last_tokens = decoder, arena, last_tokens
        self.max_rows = max_rows
        self.queries = c.heads
        fused = (max_rows, c.heads + 2 * c.kv_heads, c.head_dim)
        device, dtype = kernels.device, kernels.dtype
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        slots = torch.zeros((len(decoder.windows), max_rows), dtype=torch.int64, device=device)
        self.mappings = [SlotMapping(positions, each) for each in slots]
        # For a mixture of experts: rows of a step that are no padding, and a Played.
        self.given = torch.tensor([max_rows, 0], dtype=torch.int32, device=device)
        residual = torch.zeros((max_rows, c.hidden), dtype=dtype, device=device)
        self.state = LayerState(residual, torch.zeros(fused, dtype=dtype, device=device))
        width = c.heads * c.head_dim
        self.attended = torch.zeros((max_rows, width), dtype=dtype, device=device)
        # The last segment runs for the LM head's rows alone. Its inputs reuse buffers that are free
        # by then: the heads, and the hidden states that it overwrites.
        self.picked = self.state.heads.view(-1)[: max_rows * width].view(max_rows, width)
        self.hidden = torch.zeros_like(residual)
        self._pool = pool
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._capture_all()

    def run(self, step: Step) -> torch.Tensor:
        """Graphs.run, of any step."""
        rows, cache = len(step.tokens), self.arena.layers()
        ids, mappings, logits_indices = upload(self.decoder.kernels, step, self.last_tokens)
        plans = self.decoder.plan(step.layout)
        graphs = self._place(ids, mappings, step.routing)
        queries, out = self.state.heads[:rows, : self.queries], self.attended[:rows]
        for index, layer in enumerate(cache):
            self._pool.replay(graphs[index])
            self.decoder.attend(index, queries, layer, plans, out)
        return self._finish(rows, logits_indices, step.routing)

    def _finish(self, rows: int, logits_indices: torch.Tensor, played: Played) -> torch.Tensor:
        """Runs the last segment, padded from the number of the LM head's rows."""
        count = len(logits_indices)
        if count:
            torch.index_select(self.attended[:rows], 0, logits_indices, out=self.picked[:count])
            torch.index_select(
                self.state.residual[:rows], 0, logits_indices, out=self.hidden[:count]
            )
            self._give(count, played)
            self._pool.replay(self._graphs[self._padded(count)][-1])
        return self.hidden[:count]

    def _padded(self, rows: int) -> int:
        return min(row_counts.padded(rows), self.max_rows)

    def _give(self, rows: int, played: Played) -> None:
        if self.decoder.config.experts is not None:
            self.given[:1].fill_(rows)
            self.given[1:].fill_(played)

    def _place(
        self, ids: torch.Tensor, mappings: Mappings, played: Played
    ) -> list[torch.cuda.CUDAGraph]:
        """Copies the inputs to where the graphs for so many rows read them. -> these"""
        rows = len(ids)
        assert rows <= self.max_rows, "the scheduler's limit"
        padded = self._padded(rows)
        self._give(rows, played)
        self.ids[:rows].copy_(ids)
        placed = [(self.mappings[0].positions, mappings[0].positions)]
        placed += [(a.slots, b.slots) for a, b in zip(self.mappings, mappings, strict=True)]
        for into, given in placed:
            into[:rows].copy_(given)
            if rows < padded:
                into[rows:padded].zero_()
        return self._graphs[padded]

    def _capture_all(self) -> None:
        cache = self.arena.layers()
        with self._pool.stream():
            for rows in reversed(row_counts.captured(self.max_rows)):
                for segment in (0, 1, len(cache)):
                    self._run(segment, rows, cache)
                self._graphs[rows] = self._pool.capture(
                    partial(self._run, segment, rows, cache) for segment in range(len(cache) + 1)
                )

    def _run(self, segment: int, rows: int, cache: list[KVLayer]) -> None:
        """Segment 0 ends at the first attention; segment i is between attentions i - 1 and i."""
        mappings = [SlotMapping(m.positions[:rows], m.slots[:rows]) for m in self.mappings]
        state = LayerState(self.state.residual[:rows], self.state.heads[:rows])
        given = Given(rows, on_device=self.given)
        if segment == 0:
            made = self.decoder.start(self.ids[:rows], mappings, cache[0], state.heads)
            state.residual.copy_(made.residual)
        elif segment < len(cache):
            attended, kv = self.attended[:rows], cache[segment]
            self.decoder.between(segment - 1, attended, state, mappings, kv, given, state.heads)
        else:
            hidden = self.hidden[:rows]
            hidden.copy_(self.decoder.finish(self.picked[:rows], hidden, given))
