"""Runs a batch on the device: the decoder, then LM head, logprobs and sampling in chunks of rows.

`launch` only enqueues the work; `InFlightStep.wait` reads the results, a step later on a GPU. A
token that was sampled and not read yet is taken from `last_tokens`, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvline_server import device_errors
from kvline_server.engine.batch import Batch
from kvline_server.engine.logprobs import Table
from kvline_server.engine.request import Scores
from kvline_server.engine.sampling import sample
from kvline_server.kernels import tuning
from kvline_server.kernels.interface import Fetch, RowScores, SlotMapping
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import Arena
from kvline_server.model.decoder import Decoder
from kvline_server.worker.graphs import GraphSegments


@dataclass(slots=True)
class _DeviceOutputs:
    """Results of a batch's chunks, on the device."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    prompts: list[RowScores] = field(default_factory=list)
    outputs: list[tuple[list[int], RowScores]] = field(default_factory=list)  # rows, their scores


@dataclass(frozen=True, slots=True)
class _DeviceInputs:
    """What the LM head's chunks read."""

    hidden: torch.Tensor  # [scored + sampled, hidden]
    targets: torch.Tensor  # int64 [scored]


class InFlightStep:
    """A launched batch whose results have not been read yet."""

    def __init__(self, batch: Batch, outputs: _DeviceOutputs, fetch: Fetch) -> None:
        self.batch = batch
        self._outputs = [rows for rows, _ in outputs.outputs]
        self._prompts = min(1, len(outputs.prompts))
        self._fetch = fetch

    def wait(self) -> tuple[np.ndarray, list[Scores | None], Table | None]:
        """Sampled token ids [sampled], their scores, and the scores of all scored rows."""
        with device_errors.translated("wait"):  # asynchronous device errors surface here
            tokens, *arrays = self._fetch.wait()
        tables = [Table(*arrays[i : i + 4]) for i in range(0, len(arrays), 4)]
        prompts = tables[0] if self._prompts else None
        scores: list[Scores | None] = [None] * len(self.batch.sampled)
        for rows, table in zip(self._outputs, tables[self._prompts :], strict=True):
            for at, row in enumerate(rows):
                wanted = self.batch.sampled[row].params.logprobs or 0
                scores[row] = table.cut(at, at + 1, wanted, tokens[row : row + 1])
        return tokens, scores, prompts


class Runner:
    def __init__(self, decoder: Decoder, arena: Arena, logprob_rows: int, slots: int) -> None:
        self.decoder = decoder
        self.kernels = decoder.kernels
        self.arena = arena
        self.logprob_rows = logprob_rows
        self.rows_run = 0  # rows given to the LM head, for the invariant rows == sampled + scored
        self.forward = decoder.step
        self.graphs: GraphSegments | None = None
        # The last sampled token of each running sequence, by its slot. int64 [slots]
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=self.kernels.device)

    def tune(self, max_rows: int, known: Choices | None) -> Choices | None:
        """Autotunes the GEMMs, or takes the `known` choices. The LM head is left out. Returns the
        choices, None when there is nothing to tune. Raises as launch does."""
        rows = tuning.trial_rows(max_rows)
        with device_errors.translated("tune"):
            return self.kernels.tune(self.decoder.gemm_weights(), rows, known)

    @torch.inference_mode()
    def warm_up(self, max_rows: int) -> int:
        """Runs each row count once, so that the kernels allocate what they keep for it; the arena
        must have a page. Returns the number of row counts. Raises as launch does."""
        counts = self.kernels.row_counts(max_rows)
        with device_errors.translated("warm-up"):
            for rows in counts:
                self.decoder.warm_up(rows, self.arena.layers())
        return len(counts)

    def capture(self, max_rows: int) -> bool:
        """Captures CUDA graphs where the device has them; the arena must have a page. Its addresses
        never change, so the graphs stay valid. Raises as launch does."""
        with device_errors.translated("capture"):
            if self.kernels.captures:
                self.graphs = GraphSegments(self.decoder, self.arena.layers(), max_rows)
                self.forward = self.graphs.step
        return self.kernels.captures

    def launch(self, batch: Batch) -> InFlightStep:
        """Raises DeviceOutOfMemory when the device refuses memory, DeviceFailure when it fails."""
        with device_errors.translated("launch"):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> InFlightStep:
        kernels = self.kernels
        layout = batch.layout
        ids, positions, slots, pending_rows, pending_slots, rows, targets, sampled = kernels.upload(
            batch.token_ids,
            layout.positions,
            layout.slots,
            batch.pending_rows,
            batch.pending_slots,
            batch.rows,
            batch.targets,
            batch.sampled_slots,
        )
        if len(batch.pending_rows):
            ids.index_copy_(0, pending_rows, self.last_tokens[pending_slots])
        hidden = self.forward(ids, SlotMapping(positions, slots), self.arena.layers(), layout, rows)
        inputs, outputs = _DeviceInputs(hidden, targets), _DeviceOutputs()
        for start in range(0, len(batch.rows), self.logprob_rows):
            self._chunk(batch, inputs, start, outputs)
        tokens = torch.cat(outputs.tokens) if outputs.tokens else self.last_tokens[:0]
        if len(tokens):
            # The next step may embed these before the host reads them, so NO_TOKEN becomes 0.
            self.last_tokens.index_copy_(0, sampled, tokens.clamp(min=0))
        # One table for all chunks, because each tensor is a copy of its own.
        prompts = [RowScores.stack(outputs.prompts)] if outputs.prompts else []
        tables = [*prompts, *(table for _, table in outputs.outputs)]
        wanted = [tokens, *(tensor for table in tables for tensor in table.tensors())]
        return InFlightStep(batch, outputs, kernels.fetch(wanted))

    def _chunk(
        self, batch: Batch, inputs: _DeviceInputs, start: int, outputs: _DeviceOutputs
    ) -> None:
        """One chunk of rows through the LM head; scored rows come first, then sampled ones."""
        hidden = inputs.hidden[start : start + self.logprob_rows]
        end, scored = start + len(hidden), len(batch.targets)
        self.rows_run += len(hidden)
        logits = self.decoder.compute_logits(hidden)
        count = max(0, min(scored, end) - start)
        if count:
            targets = inputs.targets[start : start + count]
            top = max(run.sequence.params.prompt_logprobs or 0 for run in batch.scored)
            outputs.prompts.append(self.kernels.score(logits[:count], targets, top))
        if end > scored:
            first = max(start, scored) - scored
            self._sample(logits[count:], batch, first, end - scored, outputs)

    def _sample(
        self, logits: torch.Tensor, batch: Batch, first: int, last: int, outputs: _DeviceOutputs
    ) -> None:
        sequences = list(batch.sampled[first:last])
        with_logprobs = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        if not with_logprobs:
            outputs.tokens.append(sample(self.kernels, logits, sequences))
            return
        (at,) = self.kernels.upload(np.asarray(with_logprobs))
        raw = logits[at]  # before penalties and temperature, which may be written in place
        chosen = sample(self.kernels, logits, sequences)
        outputs.tokens.append(chosen)
        top = max(sequences[i].params.logprobs or 0 for i in with_logprobs)
        table = self.kernels.score(raw, chosen[at].clamp_(min=0), top)
        outputs.outputs.append(([first + i for i in with_logprobs], table))
