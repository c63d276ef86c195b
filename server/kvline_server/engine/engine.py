"""The engine: a step schedules, launches a batch, reads the results of the step before, publishes.

On a GPU the host prepares a step while the one before runs (asynchronous scheduling): a sequence's
next token may be scheduled before the host has read its last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvline_server.engine import batch as batches
from kvline_server.engine.encoding import Encoding
from kvline_server.engine.head import Head, by_head
from kvline_server.engine.logprobs import cut, join
from kvline_server.engine.masks import Masks, Verdict
from kvline_server.engine.pictures import Pictures
from kvline_server.engine.request import Scores, Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Speculation, accepted, by_ngrams
from kvline_server.engine.work import Work
from kvline_server.grammars.matchers import Matchers
from kvline_server.ipc.messages import WRONG_PIXELS
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.layout import NO_TOKEN
from kvline_server.memory.caches import Caches
from kvline_server.memory.states import StatePool
from kvline_server.parallel.executor import Executor
from kvline_server.worker.step import NO_CONSTRAINTS, Constraints, InFlight, Results

# error: the model's numbers for this sequence are not finite, so there is no next token; or its
# grammar could not be followed, or its image is no longer in memory.
FinishReason = Literal["stop", "length", "error"]
NO_VERDICTS: dict[Sequence, Verdict] = {}


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: batches.Batch
    step: InFlight
    verdicts: dict[Sequence, Verdict]  # sequences that end with it
    at: float  # when it was launched, or its drafts were begun
    host: float  # seconds that the host prepared it


@dataclass(slots=True)
class Output:
    """What one sequence gained in a step."""

    sequence: Sequence
    tokens: list[int]
    scores: Scores | None  # of the tokens, when asked for
    finish: FinishReason | None
    prompt_scores: Scores | None = None  # whole, with the first token
    reason: str = ""  # WRONG_PIXELS, or why its grammar could not be followed, where it failed so


class Engine:
    def __init__(
        self,
        executor: Executor,
        max_running: int,
        max_step_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        mixed_prefill_tokens: int | None = None,
        draft_tokens: int = 0,
        matchers: Matchers | None = None,
        states: StatePool | None = None,
        encoding: Encoding | None = None,
        axes: bool = False,
        head: Head | None = None,
    ) -> None:
        """`mixed_prefill_tokens`: prompt rows that a mixed step always allows; None: no limit.
        `draft_tokens` of a decode, at most. Without `matchers` sequences with a grammar fail.
        `states` of a model with recurrent layers, `encoding` of one that sees images; `axes`:
        whether their positions differ by axis. Draft tokens are those of the `head`, or n-grams."""
        self.executor = executor
        self.caches = Caches(executor.windows, executor.pages, max_step_tokens, states)
        self.head, propose = head, by_ngrams if head is None else by_head
        self.speculation = Speculation(draft_tokens, propose) if draft_tokens else None
        self.encoding, self.axes = encoding, axes
        self.scheduler = Scheduler(
            self.caches,
            max_running,
            max_step_tokens,
            mixed_prefill_tokens,
            self.speculation,
            encoding,
        )
        self.masks = Masks(matchers)
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sequences: dict[int, Sequence] = {}
        self.steps = 0
        self._in_flight: deque[_Launched] = deque()
        self._read_at = 0.0  # when the results of the last step were there

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._in_flight

    @property
    def progress(self) -> int:
        """Rises while work goes on: steps, and slices of the encoder."""
        return self.steps + (self.encoding.slices if self.encoding is not None else 0)

    def submit(
        self, id: int, tokens: list[int], params: SamplingParams, pictures: Pictures | None = None
    ) -> None:
        sequence = Sequence(id, tokens, len(tokens), params, pictures)
        sequence.limit = min(sequence.limit, self.max_model_len)
        self.sequences[id] = sequence
        self.masks.begin(sequence)
        self.scheduler.add(sequence)

    def abort(self, id: int) -> None:
        """Drops a sequence and frees its pages; an unknown id has already ended. Work in flight for
        it finishes on the device before any later step can write to its pages."""
        sequence = self.sequences.pop(id, None)
        if sequence is not None:
            sequence.ended = True
            self.masks.end(sequence)
            self.scheduler.remove(sequence)

    def step(self) -> list[Output]:
        """Launches a batch and reads the results of the step before; on the CPU, those of this
        step. Drafts begin behind the last token, so it is read first. Empty when there are no
        results yet."""
        early = self._collect(0) if self._waits() else list[Output]()
        drafting = self._draft()
        begun = time.monotonic()
        if self.encoding is not None:
            for sequence in self.encoding.advance(self.scheduler.running):
                self.abort(sequence.id)
                early.append(Output(sequence, [], None, "error", reason=WRONG_PIXELS))
        work = self.scheduler.schedule()
        if work:
            rows = batches.Rows(work)
            if rows.constrained:
                early += self._launch_constrained(rows, work, begun, drafting)
            else:
                batch = self._batch(rows, rows.constraints())
                now = time.monotonic()
                launched = self.executor.launch(batch.step)
                at, host = now - drafting, now - begun
                self._in_flight.append(_Launched(batch, launched, NO_VERDICTS, at, host))
                self._advance(batch, work)
            self.steps += 1
        late = self._collect(self.executor.depth if work else 0)
        return early + late if early else late

    def _batch(
        self, rows: batches.Rows, constraints: Constraints = NO_CONSTRAINTS
    ) -> batches.Batch:
        batch = rows.batch(self.caches.to_clear(), constraints)
        if self.encoding is None and self.head is None:
            return batch
        step, work = batch.step, rows.decodes + rows.prompts
        if self.encoding is not None:
            step = self.encoding.place(step, work)
        if self.head is not None:
            step = replace(step, hidden=self.head.states(work))
        return replace(batch, step=step)

    def _draft(self) -> float:
        """Of a draft head, the draft tokens of the next step. -> the seconds that they took, which
        are part of that step's: what a row costs has what its draft did."""
        if self.head is None or self.speculation is None:
            return 0.0
        begun = time.monotonic()
        self.head.draft(self.scheduler, self.speculation)
        return time.monotonic() - begun

    def _launch_constrained(
        self, rows: batches.Rows, work: list[Work], begun: float, drafting: float
    ) -> list[Output]:
        """A step whose constraints depend on the tokens before: where these are not read yet, that
        is done while its forward pass runs."""
        asked = None if rows.pending else self.masks.ask(rows)
        batch, out = self._batch(rows), list[Output]()
        now = time.monotonic()
        forward = self.executor.forward(batch.step)
        self._advance(batch, work)
        if asked is None:
            out = self._collect(0)
            asked = self.masks.ask(rows)
        masks, verdicts = self.masks.wait(asked, self.executor.vocabulary)
        there = time.monotonic()
        step = forward.sample(rows.constraints(masks))
        host = now - begun + time.monotonic() - there
        self._in_flight.append(_Launched(batch, step, verdicts, now - drafting, host))
        return out

    def _waits(self) -> bool:
        """Whether the next step is scheduled with all tokens read."""
        if self.speculation is None:
            return False
        self.speculation.refresh()
        if not self._in_flight:
            return False
        drafting = self._in_flight[-1].batch.drafts
        return bool(drafting) or self.speculation.waits(self.scheduler.running)

    def _advance(self, batch: batches.Batch, work: list[Work]) -> None:
        """Updates the sequences with what is known of a step before its tokens are read."""
        self.scheduler.advance(work)
        for run in batch.scored:
            run.sequence.scored = run.first + run.count
        for sequence, count in zip(batch.sampled, batch.counts, strict=True):
            sequence.pending += count

    def _collect(self, depth: int) -> list[Output]:
        """Waits for all steps in flight but the last `depth` and publishes their tokens."""
        out: list[Output] = []
        while len(self._in_flight) > depth:
            launched = self._in_flight.popleft()
            batch, results = launched.batch, launched.step.wait()
            _distribute(batch, results)
            scores, before = _listed(batch, results), len(out)
            sampled = results.tokens.tolist()
            if launched.verdicts:
                out += self._ended(launched, sampled, scores)
            if batch.drafts:
                each = zip(batch.sampled, batch.drafts, batch.split(sampled), strict=True)
                for at, (sequence, drafts, own) in enumerate(each):
                    if not sequence.ended:
                        out.append(self._publish_drafted(sequence, own, drafts, scores.get(at)))
            else:  # the common case
                for at, (sequence, token) in enumerate(zip(batch.sampled, sampled, strict=True)):
                    if not sequence.ended:
                        out.append(self._publish(sequence, token, scores.get(at)))
            if self.speculation is not None:
                self._note(self.speculation, launched, sum(len(o.tokens) for o in out[before:]))
        return out

    def _publish(self, sequence: Sequence, token: int, scores: Scores | None) -> Output:
        """What was sampled behind its last token."""
        if token == NO_TOKEN or sequence.not_finite:
            return self._fail(sequence)
        sequence.pending -= 1
        known = len(sequence.tokens)
        finish = self._append(sequence, token)
        self.scheduler.confirm(sequence, known)
        out = Output(sequence, [token], scores, finish)
        if known == sequence.prompt_length and sequence.scores:
            out.prompt_scores = join(sequence.scores)
            sequence.scores = []
        if finish is not None:
            self.abort(sequence.id)
        return out

    def _publish_drafted(
        self, sequence: Sequence, sampled: list[int], drafts: Items[int], scores: Scores | None
    ) -> Output:
        """What was sampled behind its last token and `drafts`, with the scores of each."""
        if not drafts:
            return self._publish(sequence, sampled[0], scores)
        if NO_TOKEN in sampled:
            return self._fail(sequence)
        sequence.pending -= len(sampled)
        new: list[int] = []
        finish: FinishReason | None = None
        for token in sampled[: 1 + accepted(drafts, sampled)]:
            new.append(token)
            finish = self._append(sequence, token)
            if finish is not None:
                break
        computed = len(sequence.tokens) - 1
        self.scheduler.confirm(sequence, computed)
        self.scheduler.truncate(sequence, computed)
        if self.speculation is not None:
            self.speculation.drafted += len(drafts)
            self.speculation.accepted += len(new) - 1
        if finish is not None:
            self.abort(sequence.id)
        return Output(sequence, new, scores and scores.rows(0, len(new)), finish)

    def _append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """-> why it ends with this token; None: it goes on. With max_tokens 0, as prompt logprobs
        alone are asked for, it ends with the first."""
        sequence.tokens.append(token)
        if token in self.eos_token_ids and not sequence.params.ignore_eos:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else None

    def _ended(
        self, launched: _Launched, sampled: list[int], scores: dict[int, Scores]
    ) -> list[Output]:
        """Of sequences that end with a step as its masks have shown. Where nothing can follow, what
        was sampled stands for an end token."""
        out: list[Output] = []
        batch = launched.batch
        for at, (sequence, own) in enumerate(zip(batch.sampled, batch.split(sampled), strict=True)):
            verdict = launched.verdicts.get(sequence)
            if verdict is None or sequence.ended:
                continue
            if verdict.finish == "error":
                self.abort(sequence.id)
                out.append(Output(sequence, [], None, "error", reason=verdict.reason))
                continue
            first = scores.get(at)
            made = self._publish(sequence, own[0], first and first.rows(0, 1))
            if made.finish != "error":
                made.finish = "stop"
                self.abort(sequence.id)
            out.append(made)
        return out

    def _fail(self, sequence: Sequence) -> Output:
        """After a result of it that was not finite."""
        self.scheduler.fail(sequence)
        self.abort(sequence.id)
        return Output(sequence, [], None, "error")

    def _note(self, speculation: Speculation, launched: _Launched, tokens: int) -> None:
        """What drafts gave, and what the step took, of a step that was read."""
        batch, now = launched.batch, time.monotonic()
        for sequence in batch.sampled:
            if sequence in self.scheduler.running:  # one that waits has no tables
                speculation.read(sequence)
        layout = batch.step.layout
        if layout.decodes == layout.sequences:
            seconds = now - max(launched.at, self._read_at)
            speculation.costs.add(layout.rows, tokens, seconds, launched.host)
        self._read_at = now


def _listed(batch: batches.Batch, results: Results) -> dict[int, Scores]:
    """The logprobs of sampled tokens, by the place of their sequence in the batch."""
    found: dict[int, Scores] = {}
    if results.listed is None:
        return found
    row = listed = 0
    for at, (sequence, count) in enumerate(zip(batch.sampled, batch.counts, strict=True)):
        end, top = row + count, sequence.params.logprobs
        if top is not None:
            last = listed + count
            found[at] = cut(results.listed, listed, last, top, results.tokens[row:end])
            listed = last
        row = end
    return found


def _distribute(batch: batches.Batch, results: Results) -> None:
    """Gives each sequence the scores of its own prompt positions."""
    table, at = results.scored, 0
    if table is None:
        return
    for run in batch.scored:
        end = at + run.count
        top = run.sequence.params.prompt_logprobs or 0
        run.sequence.not_finite |= bool(np.isnan(table.values[at:end]).any())
        run.sequence.scores.append(cut(table, at, end, top, batch.step.targets[at:end]))
        at = end
