"""The engine: one step is schedule, launch, read what flew before, publish.

Where the device works beside the host, a step is prepared while the one before runs: a sequence's
last token may not have been read yet when its next one is asked for. Knows sequences and tensors;
knows nothing of sockets, text or HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvline_server.engine import batch as batches
from kvline_server.engine.logprobs import Table, join
from kvline_server.engine.request import SamplingParams, Scores, Sequence
from kvline_server.engine.runner import Flight, Runner
from kvline_server.engine.scheduler import Scheduler, Work
from kvline_server.memory.pages import PagePool

# error: the model's numbers for this sequence are not finite, so there is no next token.
FinishReason = Literal["stop", "length", "error"]


@dataclass(slots=True)
class Output:
    """What one sequence gained in a step."""

    sequence: Sequence
    token: int
    scores: Scores | None  # of the token, when asked for
    finish: FinishReason | None
    prompt_scores: Scores | None = None  # whole, with the first token


class Engine:
    def __init__(
        self,
        runner: Runner,
        pages: int,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        mixed_prefill_tokens: int | None = None,  # the least that a mixed step allows; None: all
    ) -> None:
        self.runner = runner
        self.pool = PagePool(pages)
        self.scheduler = Scheduler(self.pool, max_running, max_step_tokens, mixed_prefill_tokens)
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sequences: dict[int, Sequence] = {}
        self.steps = 0
        self._flights: deque[Flight] = deque()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._flights

    def submit(self, id: int, tokens: list[int], params: SamplingParams) -> None:
        sequence = Sequence(id=id, tokens=tokens, prompt_length=len(tokens), params=params)
        self.sequences[id] = sequence
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """Forgets a sequence and frees its pages; unknown ids ended already. What is in flight for
        it runs before whatever takes its pages next."""
        sequence = self.sequences.pop(id, None)
        if sequence is not None:
            sequence.ended = True
            self.scheduler.remove(sequence)

    def step(self) -> list[Output]:
        """Launches what is schedulable, and reads the step before, or this one where the device
        is the host. Empty when nothing came to be known."""
        work = self.scheduler.schedule()
        if work:
            _admit(work)
            batch = batches.build(work)
            self._flights.append(self.runner.launch(batch))
            self._advance(batch, work)
            self.steps += 1
        return self._land(self.runner.kernels.depth if work else 0)

    def _advance(self, batch: batches.Batch, work: list[Work]) -> None:
        """All that is known of a step before its tokens are."""
        self.scheduler.advance(work)
        for run in batch.scored:
            run.sequence.scored = run.first + run.count
        for sequence in batch.sampled:
            if sequence.params.max_tokens:
                sequence.pending += 1
            if self._is_full(sequence, sequence.length):
                self.scheduler.remove(sequence)

    def _is_full(self, sequence: Sequence, length: int) -> bool:
        """Whether it ends by length once it has so many tokens."""
        said = length - sequence.prompt_length
        return said >= sequence.params.max_tokens or length >= self.max_model_len

    def _land(self, depth: int) -> list[Output]:
        """Reads all flights but the last `depth`."""
        out: list[Output] = []
        while len(self._flights) > depth:
            flight = self._flights.popleft()
            tokens, scores, prompts = flight.wait()
            if prompts is not None:
                _hand_out(flight.batch, prompts)
            for sequence, token, score in zip(flight.batch.sampled, tokens, scores, strict=True):
                if not sequence.ended:
                    out.append(self._publish(sequence, int(token), score))
        return out

    def _publish(self, sequence: Sequence, token: int, scores: Scores | None) -> Output:
        if token < 0 or sequence.broken:
            self.abort(sequence.id)
            return Output(sequence, 0, None, "error")
        first = len(sequence.tokens) == sequence.prompt_length
        finish: FinishReason | None = "length"
        if sequence.params.max_tokens:  # 0: only the prompt's own logprobs were wanted
            sequence.tokens.append(token)
            sequence.pending -= 1
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
        return "length" if self._is_full(sequence, len(sequence.tokens)) else None


def _admit(work: list[Work]) -> None:
    """Notes how long those have waited that are in a step for the first time: the last of it."""
    now = time.monotonic()
    for item in reversed(work):
        if item.sequence.waited is not None:
            break
        item.sequence.waited = now - item.sequence.submitted


def _hand_out(batch: batches.Batch, table: Table) -> None:
    """Gives each sequence the scores of its own prompt positions."""
    at = 0
    for run in batch.scored:
        end = at + run.count
        top = run.sequence.params.prompt_logprobs or 0
        run.sequence.broken |= bool(np.isnan(table.values[at:end]).any())
        run.sequence.scores.append(table.cut(at, end, top, batch.targets[at:end]))
        at = end
