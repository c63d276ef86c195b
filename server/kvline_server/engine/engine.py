"""The engine: one step is schedule, run, sample, publish.

Knows sequences and tensors; knows nothing of sockets, text or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kvline_server.engine import batch as batches
from kvline_server.engine.logprobs import cut, join, stack
from kvline_server.engine.request import SamplingParams, Scores, Sequence
from kvline_server.engine.sampling import sample
from kvline_server.engine.scheduler import Scheduler
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.kernels.interface import RowScores
from kvline_server.memory.arena import Arena
from kvline_server.memory.pages import PagePool
from kvline_server.model.decoder import Decoder

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Output:
    """What one sequence gained in a step."""

    sequence: Sequence
    token: int
    scores: Scores | None  # of the token, when asked for
    finish: FinishReason | None
    prompt_scores: Scores | None = None  # whole, with the first token


class Runner:
    """Runs a batch: decoder over the arena, then LM head, logprobs and sampling by chunks."""

    def __init__(self, decoder: Decoder, arena: Arena, logprob_rows: int) -> None:
        self.decoder = decoder
        self.arena = arena
        self.logprob_rows = logprob_rows
        self.rows_run = 0  # rows given to the LM head, for the invariant rows == sampled + scored

    def run(self, batch: batches.Batch) -> tuple[np.ndarray, list[Scores | None]]:
        """Sampled token ids [sampled] and their scores; scored prompt rows go to their sequences.

        Raises DeviceOutOfMemory when the device refuses memory.
        """
        try:
            return self._run(batch)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error

    @torch.inference_mode()
    def _run(self, batch: batches.Batch) -> tuple[np.ndarray, list[Scores | None]]:
        kernels = self.decoder.kernels
        plan = kernels.plan(batch.layout)
        hidden = self.decoder.forward(kernels.tensor(batch.token_ids), self.arena.layers(), plan)
        tokens = np.empty(len(batch.sampled), dtype=np.int64)
        output_scores: list[Scores | None] = [None] * len(batch.sampled)
        scored = len(batch.targets)
        pieces: list[RowScores] = []
        top = max((run.sequence.params.prompt_logprobs or 0 for run in batch.scored), default=0)
        for start in range(0, len(batch.rows), self.logprob_rows):
            rows = kernels.tensor(batch.rows[start : start + self.logprob_rows])
            end = start + len(rows)
            self.rows_run += len(rows)
            logits = self.decoder.compute_logits(hidden[rows])
            judged = max(0, min(scored, end) - start)  # scored rows of this chunk come first
            if judged:
                targets = batch.targets[start : start + judged]
                pieces.append(kernels.score(logits[:judged], targets, top))
            if end > scored:
                first = max(start, scored) - scored
                self._sample(logits[judged:], batch, first, end - scored, tokens, output_scores)
        _hand_out(batch, pieces)
        return tokens, output_scores

    def _sample(
        self,
        logits: torch.Tensor,
        batch: batches.Batch,
        first: int,
        last: int,
        tokens: np.ndarray,
        scores: list[Scores | None],
    ) -> None:
        sequences = list(batch.sampled[first:last])
        asked = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
        # Raw logprobs are of the logits before penalties, which sampling writes in place.
        raw = logits[asked] if asked else None
        kernels = self.decoder.kernels
        chosen = sample(kernels, logits, sequences)
        tokens[first:last] = chosen
        if raw is None:
            return
        top = max(sequences[i].params.logprobs or 0 for i in asked)
        table = kernels.score(raw, chosen[asked], top)
        for row, i in enumerate(asked):
            wanted = sequences[i].params.logprobs or 0
            scores[first + i] = cut(table, row, row + 1, wanted, chosen[i : i + 1])


def _hand_out(batch: batches.Batch, pieces: list[RowScores]) -> None:
    """Gives each sequence the scores of its own prompt positions."""
    if not pieces:
        return
    table = stack(pieces)
    at = 0
    for run in batch.scored:
        end = at + run.count
        top = run.sequence.params.prompt_logprobs or 0
        run.sequence.scores.append(cut(table, at, end, top, batch.targets[at:end]))
        run.sequence.scored = run.first + run.count
        at = end


class Engine:
    def __init__(
        self,
        runner: Runner,
        pages: int,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.runner = runner
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(self.pool, max_running, max_step_tokens)
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sequences: dict[int, Sequence] = {}
        self.steps = 0

    def submit(self, id: int, tokens: list[int], params: SamplingParams) -> None:
        sequence = Sequence(id=id, tokens=tokens, prompt_length=len(tokens), params=params)
        self.sequences[id] = sequence
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """Forgets a sequence and frees its pages; unknown ids ended already."""
        sequence = self.sequences.pop(id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def step(self) -> list[Output]:
        """One step over whatever is schedulable; empty when there was nothing to do."""
        work = self.scheduler.schedule()
        if not work:
            return []
        batch = batches.build(work)
        tokens, scores = self.runner.run(batch)
        self.scheduler.advance(work)
        self.steps += 1
        return [
            self._publish(sequence, int(token), score)
            for sequence, token, score in zip(batch.sampled, tokens, scores, strict=True)
        ]

    def _publish(self, sequence: Sequence, token: int, scores: Scores | None) -> Output:
        first = sequence.output_length == 0
        finish: FinishReason | None = "length"
        if sequence.params.max_tokens:  # 0: only the prompt's own logprobs were wanted
            sequence.tokens.append(token)
            finish = self._finish_reason(sequence, token)
        if finish is not None:
            self.abort(sequence.id)
        out = Output(sequence, token, scores, finish)
        if first and sequence.scores:
            out.prompt_scores = join(sequence.scores)
            sequence.scores = []
        return out

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in self.eos_token_ids and not sequence.params.ignore_eos:
            return "stop"
        if sequence.output_length >= sequence.params.max_tokens:
            return "length"
        return "length" if len(sequence.tokens) >= self.max_model_len else None
