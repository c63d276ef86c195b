"""Runs a batch on the device: decoder over the arena, then LM head, scores and draws by chunks.

`launch` only asks for the work; what comes of it is read from the flight, a step later where the
device works beside the host. A token that has been sampled but not read is known by its slot in
`recent`, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvline_server import device_errors
from kvline_server.engine.batch import Batch
from kvline_server.engine.logprobs import Table
from kvline_server.engine.request import Scores
from kvline_server.engine.sampling import sample
from kvline_server.kernels import tuning
from kvline_server.kernels.interface import Fetch, Forward, Graphs, RowScores, Where
from kvline_server.memory.arena import Arena
from kvline_server.model.decoder import Decoder


@dataclass(slots=True)
class _Asked:
    """What a batch's chunks gave, still on the device."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    prompts: list[RowScores] = field(default_factory=list)
    outputs: list[tuple[list[int], RowScores]] = field(default_factory=list)  # rows, their scores


@dataclass(frozen=True, slots=True)
class _There:
    """A batch's tensors, once the decoder ran."""

    hidden: torch.Tensor  # [scored + sampled, hidden]
    targets: torch.Tensor  # int64 [scored]


class Flight:
    """A batch on its way."""

    def __init__(self, batch: Batch, asked: _Asked, fetch: Fetch) -> None:
        self.batch = batch
        self._outputs = [rows for rows, _ in asked.outputs]
        self._prompts = min(1, len(asked.prompts))
        self._fetch = fetch

    def wait(self) -> tuple[np.ndarray, list[Scores | None], Table | None]:
        """Sampled token ids [sampled], their scores, and the scores of all scored rows."""
        with device_errors.named("wait"):  # where what went wrong on the device comes to light
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
        self.forward: Forward = decoder.step
        self.graphs: Graphs | None = None
        self.recent = torch.zeros(slots, dtype=torch.int64, device=self.kernels.device)

    def tune(self, max_rows: int, file: Path, key: str) -> str | None:
        """Picks kernels by trial, or as an earlier start did that left `file`. The LM head is not
        among them. Says what was done; None when nothing is tunable. Raises as launch does."""
        known = tuning.read(file, key)
        rows = tuning.trial_rows(max_rows)
        with device_errors.named("tune"):
            choices = self.kernels.tune(self.decoder.gemm_weights(), rows, known)
        if choices is None:
            return None
        if known is None:
            tuning.write(file, key, choices)
        how = "tried now" if known is None else "as an earlier start found"
        return f"{len(choices)} GEMM shapes not by torch's kernel, {how}"

    @torch.inference_mode()
    def meet(self, max_rows: int) -> int:
        """Lets the kernels take what each row count of a step costs them once; the arena must have
        a page. -> how many row counts there are"""
        counts = self.kernels.row_counts(max_rows)
        for rows in counts:
            self.decoder.meet(rows, self.arena.layers())
        return len(counts)

    def capture(self, max_rows: int) -> bool:
        """Captures what the device can replay; the arena must have a page, its addresses stay.
        Raises as launch does."""
        with device_errors.named("capture"):
            self.graphs = self.kernels.graphs(self.decoder, self.arena.layers(), max_rows)
        if self.graphs is not None:
            self.forward = self.graphs.step
        return self.graphs is not None

    def launch(self, batch: Batch) -> Flight:
        """Raises DeviceOutOfMemory when the device refuses memory, DeviceFailure when it fails."""
        with device_errors.named("launch"):
            return self._launch(batch)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> Flight:
        kernels = self.kernels
        layout = batch.layout
        ids, positions, slots, late_rows, late_slots, rows, targets, sampled = kernels.upload(
            batch.token_ids,
            layout.positions,
            layout.slots,
            batch.late_rows,
            batch.late_slots,
            batch.rows,
            batch.targets,
            batch.sampled_slots,
        )
        if len(batch.late_rows):
            ids.index_copy_(0, late_rows, self.recent[late_slots])
        hidden = self.forward(ids, Where(positions, slots), self.arena.layers(), layout, rows)
        there, asked = _There(hidden, targets), _Asked()
        for start in range(0, len(batch.rows), self.logprob_rows):
            self._chunk(batch, there, start, asked)
        tokens = torch.cat(asked.tokens) if asked.tokens else self.recent[:0]
        if len(tokens):
            # The next step may read one before the host: what is no token must not be looked up.
            self.recent.index_copy_(0, sampled, tokens.clamp(min=0))
        # One table of all chunks: each tensor is a copy to the host of its own.
        prompts = [RowScores.stack(asked.prompts)] if asked.prompts else []
        tables = [*prompts, *(table for _, table in asked.outputs)]
        wanted = [tokens, *(tensor for table in tables for tensor in table.tensors())]
        return Flight(batch, asked, kernels.fetch(wanted))

    def _chunk(self, batch: Batch, at: _There, start: int, asked: _Asked) -> None:
        """Some rows through the LM head: scored ones come first in a batch, then sampled ones."""
        hidden = at.hidden[start : start + self.logprob_rows]
        end, scored = start + len(hidden), len(batch.targets)
        self.rows_run += len(hidden)
        logits = self.decoder.compute_logits(hidden)
        judged = max(0, min(scored, end) - start)
        if judged:
            targets = at.targets[start : start + judged]
            top = max(run.sequence.params.prompt_logprobs or 0 for run in batch.scored)
            asked.prompts.append(self.kernels.score(logits[:judged], targets, top))
        if end > scored:
            first = max(start, scored) - scored
            self._sample(logits[judged:], batch, first, end - scored, asked)

    def _sample(
        self, logits: torch.Tensor, batch: Batch, first: int, last: int, asked: _Asked
    ) -> None:
        sequences = list(batch.sampled[first:last])
        wanting = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        if not wanting:
            asked.tokens.append(sample(self.kernels, logits, sequences))
            return
        (at,) = self.kernels.upload(np.asarray(wanting))
        raw = logits[at]  # before penalties and temperature, which may be written in place
        chosen = sample(self.kernels, logits, sequences)
        asked.tokens.append(chosen)
        top = max(sequences[i].params.logprobs or 0 for i in wanting)
        table = self.kernels.score(raw, chosen[at].clamp_(min=0), top)
        asked.outputs.append(([first + i for i in wanting], table))
