"""Which sequences compute how many tokens next: decodes first, then prompt chunks, then arrivals.

A step lasts as long as its rows take, and each decoding sequence waits for it: in a mixed step
prompts get a bounded number of rows. A penalised sequence sits a step out while its last token is
still on its way from the device, and holds nobody up.

Pure bookkeeping: takes sequences, gives a list of Work, holds pages through the pool. Never
deadlocks: the oldest running sequence can always take pages from the youngest, and one sequence
alone always fits because the budget was validated to hold a full-length one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvline_server.engine.request import Sequence
from kvline_server.memory.pages import PAGE_SIZE, PagePool, pages_for
from kvline_server.memory.prefix import extend_chain

# Rows with which a GEMM's tiles fill a large GPU once: 8 tiles down by 16 across are 128 of an
# H200's 132 multiprocessors. Rows beyond it cost nearly as much as another wave of tiles.
WAVE = 1024
# Prompt rows of a mixed step for each request that runs or waits: few chats are not held up by a
# long prompt, and many requests are not kept from filling the batch (docs/decisions/022).
PREFILL_PER_REQUEST = 8


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence from position `start`; it samples when none is left over."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == self.sequence.length


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        max_running: int,
        max_step_tokens: int,
        mixed_prefill_tokens: int | None = None,
    ) -> None:
        self.pool = pool
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.mixed_prefill_tokens = mixed_prefill_tokens or max_step_tokens
        self.prefill_per_request = PREFILL_PER_REQUEST
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # a set by admission, oldest first
        self.preemptions = 0
        self._slots = list(range(max_running))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages come back at once."""
        if sequence in self.running:
            del self.running[sequence]
            self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def schedule(self) -> list[Work]:
        budget = self.max_step_tokens
        work: list[Work] = []
        ready = [s for s in self.running if s.wanting == 1 and not (s.tallied and s.pending)]
        filling = [s for s in self.running if s.wanting > 1]
        for sequence in ready:
            if budget and sequence in self.running:
                budget -= self._continue(sequence, budget, work)
        if work:
            wanted = self.prefill_per_request * (len(self.running) + len(self.waiting))
            budget = min(budget, max(self.mixed_prefill_tokens, wanted))
        for sequence in filling:
            if budget and sequence in self.running:
                budget -= self._continue(sequence, budget, work)
        while budget and self.waiting and len(self.running) < self.max_running:
            if self.waiting[0].pending:  # preempted a moment ago: its last token is on its way
                break
            taken = self._admit(self.waiting[0], budget, work)
            if not taken:
                break
            budget -= taken
        if self.waiting:
            _end_at_wave(work)
        return work

    def advance(self, work: list[Work]) -> None:
        """After the step ran: its tokens are in the cache, and full pages can be shared."""
        for item in work:
            sequence = item.sequence
            sequence.computed = item.start + item.count
            known = min(sequence.computed, len(sequence.tokens))
            extend_chain(sequence.chain, sequence.tokens, known)
            full = known // PAGE_SIZE
            for index in range(sequence.published, full):
                self.pool.publish(sequence.pages[index], sequence.chain[index])
            sequence.published = max(sequence.published, full)

    def _continue(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        count = min(sequence.wanting, budget)
        missing = pages_for(sequence.computed + count) - len(sequence.pages)
        busy: set[int] = set()
        while missing > 0 and not self.pool.can_take(missing):
            busy = busy or {id(item.sequence) for item in work}
            victim = next(s for s in reversed(self.running) if id(s) not in busy)
            self._preempt(victim)
            if victim is sequence:
                return 0
        if missing > 0:
            sequence.pages += self.pool.take(missing)
        work.append(Work(sequence, sequence.computed, count))
        return count

    def _admit(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        """Starts a waiting sequence if its whole prompt and a page for each runner would fit."""
        extend_chain(sequence.chain, sequence.tokens, len(sequence.tokens))
        matched = self.pool.match(sequence.chain[: max(0, sequence.matchable) // PAGE_SIZE])
        missing = pages_for(len(sequence.tokens)) - len(matched)
        reserve = len(self.running)
        if not self.pool.can_take(missing + reserve if self.running else missing):
            self.pool.release(matched)
            return 0
        self.waiting.popleft()
        self.running[sequence] = None
        sequence.slot = self._slots.pop()
        sequence.pages = matched
        sequence.computed = len(matched) * PAGE_SIZE
        sequence.published = len(matched)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        return self._continue(sequence, budget, work)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; what it has said and scored stays said and scored."""
        del self.running[sequence]
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        sequence.preemptions += 1
        self.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self._slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.published = 0


def _end_at_wave(work: list[Work]) -> None:
    """While prompts queue, the last chunks of a large step give way until it fills whole waves:
    what is over costs nothing a step later, and here as much as a wave. Where nothing of the
    prompts would be left they stay: decodes alone may be more than the last whole wave."""
    rows = sum(chunk.count for chunk in work)
    prompts = sum(chunk.count for chunk in work if chunk.count > 1)
    over = rows % WAVE if rows > WAVE else 0
    if over >= prompts:
        return
    for at in range(len(work) - 1, -1, -1):
        chunk = work[at]
        if not over:
            break
        if chunk.count > 1:  # one row is a decode, or as good as one
            less = min(over, chunk.count)
            over -= less
            left = Work(chunk.sequence, chunk.start, chunk.count - less)
            work[at : at + 1] = [left] if left.count else []
