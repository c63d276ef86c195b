"""Piecewise CUDA graphs: the decoder's segments between runs of mixers, one set a row count.

Only these depend on which sequence a row belongs to, so they are between the graphs, and one set
serves one request or five hundred. LM head, logprobs and sampling are not captured. Padding
rows write to the dummy page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

import torch

from kvline_server.kernels import row_counts
from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.routing import Played
from kvline_server.memory.groups import GroupedArena, Memory
from kvline_server.model.decoder import Decoder, LayerState, Mappings
from kvline_server.model.mixer import Projected
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
        device, dtype = kernels.device, kernels.dtype
        self.ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        slots = torch.zeros((len(decoder.windows), max_rows), dtype=torch.int64, device=device)
        self.mappings = [SlotMapping(positions, each) for each in slots]
        # For a mixture of experts: rows of a step that are no padding, and a Played.
        self.given = torch.tensor([max_rows, 0], dtype=torch.int32, device=device)
        residual = torch.zeros((max_rows, c.hidden), dtype=dtype, device=device)
        self.residual = residual
        self.encoded = torch.zeros_like(self.ids) if len(decoder.deepstack) else None
        self.mixers = [layer.mixer for layer in decoder.weights.layers]
        assert len(decoder.deepstack) < len(self.mixers), "the last segment adds none"

        def buffers(sizes: list[tuple[int, ...]]) -> list[torch.Tensor]:
            """One after the other for each place of these widths, as wide as the widest of it."""
            widest = [max(every) for every in zip_longest(*sizes, fillvalue=0)]
            return [torch.zeros(max_rows * n, dtype=dtype, device=device) for n in widest]

        # What mixers project, and what they make of it when they run.
        self.projected = buffers([mixer.widths for mixer in self.mixers])
        (self.made,) = buffers([(mixer.width,) for mixer in self.mixers])
        # The last segment runs for the LM head's rows alone. Its inputs reuse buffers that are free
        # by then, but for a gate: what is projected, and the hidden states that it overwrites.
        last = self._projected(len(self.mixers) - 1, 1).gate
        self.gate = None if last is None else last.new_zeros((max_rows, *last.shape[1:]))
        self.picked = self._of(self.projected[0], self.mixers[-1].width, max_rows)
        self.hidden = torch.zeros_like(residual)
        self._pool = pool
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._capture_all()

    def run(self, step: Step) -> torch.Tensor:
        """Graphs.run, of any step."""
        rows, memories = len(step.tokens), self.arena.layers()
        ids, mappings, logits_indices = upload(self.decoder, step, self.last_tokens)
        plans = self.decoder.plan(step.layout)
        graphs = self._place(ids, mappings, step.routing)
        for index, memory in enumerate(memories):
            self._pool.replay(graphs[index])
            projected, out = self._projected(index, rows), self._made(index, rows)
            self.decoder.run(index, projected, memory, plans, out)
        return self._finish(rows, logits_indices, step.routing)

    def _finish(self, rows: int, logits_indices: torch.Tensor, played: Played) -> torch.Tensor:
        """Runs the last segment, padded from the number of the LM head's rows."""
        count = len(logits_indices)
        if count:
            last = len(self.mixers) - 1
            gate, made = self._projected(last, rows).gate, self._made(last, rows)
            if gate is not None and self.gate is not None:  # first: it may be what is reused
                torch.index_select(gate, 0, logits_indices, out=self.gate[:count])
            torch.index_select(made, 0, logits_indices, out=self.picked[:count])
            torch.index_select(self.residual[:rows], 0, logits_indices, out=self.hidden[:count])
            self._give(count, played)
            self._pool.replay(self._graphs[self._padded(count)][-1])
        return self.hidden[:count]

    def _of(self, buffer: torch.Tensor, width: int, rows: int) -> torch.Tensor:
        """The first rows of a buffer, where all of it has rows of this width. -> [rows, width]"""
        return buffer[: self.max_rows * width].view(self.max_rows, width)[:rows]

    def _into(self, index: int, rows: int) -> list[torch.Tensor]:
        """Where the first half of mixer `index` is written."""
        widths = self.mixers[index].widths
        pairs = zip(self.projected, widths, strict=False)
        return [self._of(buffer, width, rows) for buffer, width in pairs]

    def _projected(self, index: int, rows: int) -> Projected:
        return self.mixers[index].split(self._into(index, rows))

    def _made(self, index: int, rows: int) -> torch.Tensor:
        return self._of(self.made, self.mixers[index].width, rows)

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
        memories = self.arena.layers()
        with self._pool.stream():
            for rows in reversed(row_counts.captured(self.max_rows)):
                for segment in (0, *self.decoder.segments()):
                    self._run(segment, rows, memories)
                self._graphs[rows] = self._pool.capture(
                    partial(self._run, segment, rows, memories)
                    for segment in range(len(memories) + 1)
                )

    def _run(self, segment: int, rows: int, memories: Sequence[Memory]) -> None:
        """Segment 0 ends before the first mixer runs; segment i is between mixers i - 1 and i."""
        mappings = [SlotMapping(m.positions[:rows], m.slots[:rows]) for m in self.mappings]
        residual, given = self.residual[:rows], Given(rows, on_device=self.given)
        encoded = None if self.encoded is None else self.encoded[:rows]
        if segment == len(memories):
            hidden = self.hidden[:rows]
            gate = None if self.gate is None else self.gate[:rows]
            state = LayerState(hidden, Projected((), gate))
            hidden.copy_(self.decoder.finish(self.picked[:rows], state, given))
            return
        memory, into = memories[segment], self._into(segment, rows)
        if segment == 0:
            started = self.decoder.start(self.ids[:rows], mappings, memory, given, into)
            residual.copy_(started.residual)
            if encoded is not None and started.encoded is not None:
                encoded.copy_(started.encoded)
            return
        before = segment - 1
        made = self._made(before, rows)
        state = LayerState(residual, self._projected(before, rows), encoded)
        self.decoder.between(before, made, state, mappings, memory, given, into)
