"""Runs steps on one device: the decoder, then LM head, logprobs and sampling in chunks of rows.

`launch` only enqueues the work; the results are read a step later on a GPU. A token that was
sampled and not read yet is taken from `last_tokens`, on the device. So is the input of a step whose
constraints depend on such a token: its `forward` is enqueued before they are known.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.interface import Fetch
from kvline_server.kernels.layout import Layout, greedy
from kvline_server.kernels.row_counts import tried
from kvline_server.kernels.sampling import RowScores
from kvline_server.kernels.tuning import Choices
from kvline_server.memory import device_errors
from kvline_server.memory.groups import GroupedArena
from kvline_server.model.decoder import Decoder
from kvline_server.worker.graphs.graphs import Graphs
from kvline_server.worker.inputs import upload
from kvline_server.worker.step import Constraints, Drafting, HiddenStates, Results, Step, Table
from kvline_server.worker.vocabulary import Vocabulary


@dataclass(slots=True)
class _Outputs:
    """Results of a step's chunks, on the device."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    scored: list[RowScores] = field(default_factory=list)
    listed: list[RowScores] = field(default_factory=list)

    def tables(self) -> list[RowScores]:
        """One table for all chunks, because each tensor is a copy of its own."""
        return [RowScores.stack(parts) for parts in (self.scored, self.listed) if parts]


class LaunchedStep:
    """worker.step.InFlight, of one device."""

    def __init__(self, outputs: _Outputs, fetch: Fetch) -> None:
        self._scored = bool(outputs.scored)
        self._fetch = fetch

    def wait(self) -> Results:
        with device_errors.translated("wait"):  # asynchronous device errors surface here
            tokens, *arrays = self._fetch.wait()
        tables = [Table(*arrays[i : i + 4]) for i in range(0, len(arrays), 4)]
        scored = tables.pop(0) if self._scored else None
        return Results(tokens, scored, tables[0] if tables else None)


class Worker:
    def __init__(
        self,
        decoder: Decoder,
        arena: GroupedArena,
        logprob_rows: int,
        requests: int,
        decode_rows: int = 0,
        kept: int = 0,
    ) -> None:
        """For `requests` at once, whose decodes have `decode_rows` in a step; 0: one each. With a
        draft head hidden states are `kept` in so many places."""
        self.decoder = decoder
        self.kernels = decoder.kernels
        self.vocabulary = Vocabulary(self.kernels, decoder.config.vocabulary)
        self.arena = arena
        self.logprob_rows = logprob_rows
        self.rows_run = 0  # rows given to the LM head, for the invariant rows == sampled + scored
        self.decode_rows = decode_rows or requests
        self.graphs: Graphs | None = None
        # The last sampled token of each running sequence, by its request index. int64 [requests]
        self.last_tokens = torch.zeros(requests, dtype=torch.int64, device=self.kernels.device)
        # Of a draft head. [places, hidden], of which the first stays zeros
        self.kept = decoder.weights.embedding.new_zeros((kept, decoder.config.hidden))

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        """Autotunes the GEMMs, or takes the `known` choices. The LM head is left out. Returns the
        choices, None when there is nothing to tune. Raises as launch does."""
        weights, rows = self.decoder.gemm_weights(), tried(max_rows)
        with device_errors.translated("tune"):
            if experts := self.decoder.experts():
                layers = [each.layer for each in experts]
                self.kernels.experts.tune(layers, experts[0].routing, rows, known)
            return self.kernels.gemms.tune(weights, rows, known)

    @torch.inference_mode()
    def warm_up(self, max_rows: int) -> int:
        """Runs each row count once, so that the kernels allocate what they keep for it; the arena
        must have a page. Returns the number of row counts. Raises as launch does."""
        counts = self.kernels.gemms.row_counts(max_rows)
        with device_errors.translated("warm-up"):
            for rows in counts:
                self.decoder.warm_up(rows, self.arena.layers())
        return len(counts)

    def capture(self, max_rows: int, longest: int) -> bool:
        """Captures CUDA graphs where the device has them, for steps of up to `max_rows` rows and
        sequences of up to `longest` tokens; the arena must have a page. Raises as launch does."""
        plan, last = self.kernels.attention.plan_in_place, self.last_tokens
        decodes, hybrid = self.decode_rows, self.decoder.config.recurrent is not None
        if plan is None or (hybrid and self.kernels.recurrent.plan_in_place is None):
            return False
        with device_errors.translated("capture"):
            self.graphs = Graphs(self.decoder, plan, self.arena, last, decodes, max_rows, longest)
        return True

    def launch(self, step: Step, read: bool = True) -> LaunchedStep:
        """Where nobody is to `read` the results, only the tokens are copied to the host. Raises
        DeviceOutOfMemory when the device refuses memory, DeviceFailure when it fails."""
        with device_errors.translated("launch"):
            return self._launch(step, read)

    def rehearse(self, step: Step) -> None:
        """Runs a step to its end, but not what captured graphs do. Results mean nothing. Raises as
        launch does."""
        skipped = nullcontext() if self.graphs is None else self.graphs.skipped()
        with device_errors.translated("rehearse"), skipped:
            self._launch(step, read=True).wait()

    def forward(self, step: Step) -> Forward:
        """The first part of a step, all but its LM head; nothing else is launched before the rest
        of it. Raises as launch does."""
        with device_errors.translated("launch"):
            return self._forward(step)

    def _launch(self, step: Step, read: bool) -> LaunchedStep:
        return self._forward(step).launch(step.constraints, read)

    @torch.inference_mode()
    def _forward(self, step: Step) -> Forward:
        given = [group.cleared for group in step.layout.groups]
        targets, written, *cleared = self.kernels.upload(
            step.targets, step.sampled_requests, *given
        )
        for group, pages in enumerate(cleared):
            if len(pages):
                self.arena.clear(group, pages)
        return Forward(self, step, self._hidden(step), targets, written)

    def _hidden(self, step: Step) -> torch.Tensor:
        """The decoder's output for the LM head's rows. -> [n, hidden]"""
        if self.graphs is not None:
            return self.graphs.run(step)
        ids, mappings, logits_indices = upload(self.decoder, step, self.last_tokens)
        layers, played = self.arena.layers(), step.routing
        if self.decoder.weights.drafts is None:
            return self.decoder.step(ids, mappings, layers, step.layout, logits_indices, played)
        *layers, memory = layers
        every = torch.arange(len(ids), device=ids.device)
        hidden = self.decoder.step(ids, mappings, layers, step.layout, every, played)
        if step.hidden is not None:
            before = self._before(step.hidden, step.layout, hidden)
            self.decoder.feed_drafts(ids, before, mappings, memory)
        return hidden[logits_indices]

    def _before(self, held: HiddenStates, layout: Layout, hidden: torch.Tensor) -> torch.Tensor:
        """The states of the tokens before those of a step's rows, whose own are `hidden` and are
        kept for later ones. -> [rows, hidden]"""
        firsts = layout.row_starts[:-1].astype(np.int64)
        starts, places, rows, into = self.kernels.upload(
            firsts, held.before, held.rows, held.places
        )
        made = hidden.roll(1, 0).index_copy_(0, starts, self.kept[places])
        self.kept.index_copy_(0, into, hidden[rows])
        return made

    @torch.inference_mode()
    def draft(self, drafting: Drafting) -> NDArray[np.int64]:
        """Greedy draft tokens of a draft head, once they are there; any token stands where its
        numbers are not finite. -> [sequences, passes], behind a sequence's last one any. Raises as
        launch does."""
        with device_errors.translated("draft"):
            ids, places = self.kernels.upload(drafting.tokens, drafting.before)
            hidden, memory, columns = self.kept[places], self.arena.layers()[-1], []
            for group, pages in enumerate(each.cleared for each in drafting.layouts[0].groups):
                if len(pages):
                    self.arena.clear(group, *self.kernels.upload(pages))
            for layout in drafting.layouts:
                count, written = layout.sequences, [group.slots for group in layout.groups]
                positions, *placed = self.kernels.upload(layout.positions, *written)
                mappings = [SlotMapping(positions, slots) for slots in placed]
                given = ids[:count], hidden[:count], mappings, memory, layout
                hidden = self.decoder.draft(*given)
                ids = self._likeliest(hidden)
                columns.append(torch.nn.functional.pad(ids, (0, len(places) - count)))
            (made,) = self.kernels.fetch([torch.stack(columns, dim=1)]).wait()
        return made

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """The LM head's best token of each row. [rows, hidden] -> [rows]"""
        parts = torch.split(hidden, self.logprob_rows)
        logits = (self.decoder.compute_logits(each) for each in parts)
        each = [self.vocabulary.sample(own, greedy(len(own))) for own in logits]
        return torch.cat(each).clamp_(min=0)


class Forward:
    """A step whose last hidden states are enqueued."""

    def __init__(
        self,
        worker: Worker,
        step: Step,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        written: torch.Tensor,
    ) -> None:
        """`hidden`: of the LM head's rows, [n, hidden]; `targets`: of the scored ones; `written`:
        the places of `last_tokens` that the sampled ones have."""
        self._worker = worker
        self._step = step
        self._hidden, self._targets, self._written = hidden, targets, written

    def sample(self, constraints: Constraints, read: bool = True) -> LaunchedStep:
        """The rest of the step, with these constraints in the place of its own. Raises as
        Worker.launch does."""
        with device_errors.translated("launch"):
            return self.launch(constraints, read)

    @torch.inference_mode()
    def launch(self, constraints: Constraints, read: bool) -> LaunchedStep:
        worker, outputs = self._worker, _Outputs()
        for start in range(0, len(self._step.logits_indices), worker.logprob_rows):
            self._chunk(start, constraints, outputs)
        tokens = torch.cat(outputs.tokens) if outputs.tokens else worker.last_tokens[:0]
        if len(tokens):
            # The next step may embed these before the host reads them, so NO_TOKEN becomes 0.
            worker.last_tokens.index_copy_(0, self._written, tokens.clamp(min=0))
        if not read:
            outputs = _Outputs()
        tensors = [tensor for table in outputs.tables() for tensor in table.tensors()]
        return LaunchedStep(outputs, worker.kernels.fetch([tokens, *tensors]))

    def _chunk(self, start: int, constraints: Constraints, outputs: _Outputs) -> None:
        """As many rows as the LM head gets at once, from `start` on."""
        worker, step = self._worker, self._step
        hidden = self._hidden[start : start + worker.logprob_rows]
        end, scored = start + len(hidden), len(step.targets)
        worker.rows_run += len(hidden)
        logits = worker.decoder.compute_logits(hidden)
        count = max(0, min(scored, end) - start)
        if count:
            own = self._targets[start : start + count]
            outputs.scored.append(worker.vocabulary.score(logits[:count], own, step.scored_top))
        if end > scored:
            self._sample(logits[count:], max(start, scored) - scored, constraints, outputs)

    def _sample(
        self, logits: torch.Tensor, first: int, constraints: Constraints, outputs: _Outputs
    ) -> None:
        """The next tokens of sampled rows from `first` on, one row of logits each."""
        step, last = self._step, first + len(logits)
        kernels, vocabulary = self._worker.kernels, self._worker.vocabulary
        a, b = np.searchsorted(step.listed, (first, last))
        at = raw = None
        if b > a:
            (at,) = kernels.upload(step.listed[a:b] - first)
            raw = logits[at]  # before edits and temperature, which may be written in place
        metadata = step.sampling_metadata.between(first, last)
        own = constraints.between(first, last)
        chosen = vocabulary.sample(logits, metadata, own.logits_edits, own.masks)
        outputs.tokens.append(chosen)
        if at is not None and raw is not None:
            targets = chosen[at].clamp_(min=0)
            outputs.listed.append(vocabulary.score(raw, targets, step.listed_top))
