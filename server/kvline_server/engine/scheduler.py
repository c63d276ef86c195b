"""Continuous batching with chunked prefill: decodes first, then running prompts, then new ones.

Every decode waits for the whole step, so prompts get a bounded number of rows in a mixed step.

Pure bookkeeping: sequences in, a list of Work out, pages through the caches. It cannot deadlock:
the oldest running sequence can always preempt the youngest, and one sequence alone always fits
because the budget was validated with a full-length one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Items

from kvline_server.engine.pictures import Image
from kvline_server.engine.request import Sequence
from kvline_server.engine.speculation import Speculation
from kvline_server.engine.work import NO_DRAFTS, Images, Kind, Work
from kvline_server.memory.caches import Caches, PageTable
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.memory.states import BOUNDARY

# Rows with which a GEMM's tiles fill a large GPU once: 8 tiles down by 16 across are 128 of an
# H200's 132 multiprocessors. Rows beyond it cost nearly as much as another wave of tiles.
WAVE = 1024
# Prompt rows of a mixed step for each request that runs or waits: few chats are not held up by a
# long prompt, and many requests are not kept from filling the batch (docs/decisions/022).
PREFILL_PER_REQUEST = 8
# Sequences share pages, so all their page tables may be many times the cache. Prompts that HTTP
# admits are (1 + QUEUE_FACTOR) times as long; what they share of their outputs has no such bound.
SHARED_TABLES = 6


class Scheduler:
    def __init__(
        self,
        caches: Caches,
        max_running: int,
        max_step_tokens: int,
        mixed_prefill_tokens: int | None = None,
        speculation: Speculation | None = None,
        images: Images | None = None,
    ) -> None:
        """`images` of a model that sees them."""
        self.caches = caches
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.mixed_prefill_tokens = mixed_prefill_tokens or max_step_tokens
        self.prefill_per_request = PREFILL_PER_REQUEST
        self.speculation = speculation
        self.images = images
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest admission first
        self.preemptions = 0
        self._request_indices = list(range(max_running))
        self._step = 0
        self._penalised_left = 0  # pages, in this step
        self._starting = False  # whether running sequences have had no rows yet
        self._room = 0  # of an image, whatever the budget, until a prompt has rows in this step

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a running or waiting sequence and frees its pages. Others find in the prefix
        cache only those that are confirmed, also of what it left there when it was preempted."""
        if sequence in self.running:
            del self.running[sequence]
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.caches.abandon(sequence.chain)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def schedule(self) -> list[Work]:
        budget = self.max_step_tokens
        work: list[Work] = []
        prefilling: list[Sequence] = []
        ready: list[Sequence] = []
        ending = penalised = 0  # ending: their last token is not read yet
        for sequence in self.running:
            length = len(sequence.tokens) + sequence.pending
            if length - sequence.computed > 1 or length == sequence.image_end:
                prefilling.append(sequence)
            elif sequence.pending and length >= sequence.limit:
                ending += 1
            else:
                ready.append(sequence)
                if sequence.constrained:
                    penalised += sequence.penalised
        ready = self._bounded(ready, penalised)
        live = len(self.running) - ending
        budget -= self._decode(ready, budget, work)
        self._room = budget
        if len(prefilling) < live:  # those that sit this step out decode in the next
            wanted = self.prefill_per_request * (live + len(self.waiting))
            budget = min(budget, max(self.mixed_prefill_tokens, wanted))
        for sequence in prefilling:
            if budget and sequence in self.running:
                budget = max(0, budget - self._chunk(sequence, budget, work))
        at = 0  # of those that wait, behind others whose images nobody can encode yet
        while budget and at < len(self.waiting) and len(self.running) + bool(at) < self.max_running:
            sequence = self.waiting[at]
            if sequence.pending:  # preempted a moment ago; its last token is not read yet
                break
            if self.images is not None and not self.images.claims(sequence):
                at += 1
                continue
            taken = self._admit(sequence, budget, work, at)
            if taken is None:
                break
            budget = max(0, budget - taken)
        if self.waiting:
            _trim_to_wave(work, 1 if self.caches.states is None else BOUNDARY, self.images)
        if self._starting:
            self._end_wait(work)
        if self.caches.states is not None:
            self._plan_states(work)
        return work

    def _plan_states(self, work: list[Work]) -> None:
        for sequence, start, rows, _, drafts in work:
            if not start % BOUNDARY:  # a state may be kept there, by the key of what is before
                sequence.extend_chain(min(start, len(sequence.tokens)))
            self.caches.plan(sequence.table, start, rows, sequence.chain, len(drafts))

    def advance(self, work: list[Work]) -> None:
        """After a step's launch: its tokens count as computed, and full pages can be shared."""
        windowed = self.caches.windowed
        self.caches.launched()
        for sequence, start, rows, _, drafts in work:
            sequence.computed = start + rows
            if windowed or (sequence.published + 1) * PAGE_SIZE <= sequence.computed:
                self._share(sequence, start + rows - len(drafts))

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """After draft tokens were read: the next step writes over the keys behind so many of the
        sequence, which may have been preempted since."""
        if sequence in self.running:
            self.caches.accept(sequence.table, tokens)
            sequence.computed = min(sequence.computed, tokens)
            self._share(sequence, sequence.computed)

    def _share(self, sequence: Sequence, position: int) -> None:
        """Its full pages with others, and where no later step begins before this position, those
        that no window shows any more."""
        self._publish(sequence)
        if self.caches.windowed:
            self.caches.slide(sequence.table, position)

    def confirm(self, sequence: Sequence, tokens: int) -> None:
        """After a finite result that depends on so many tokens of a sequence; it may have been
        preempted since."""
        if tokens <= sequence.computed:
            first, full = sequence.confirmed // PAGE_SIZE, tokens // PAGE_SIZE
            if full > first:
                self.caches.confirm(sequence.table, first, full)
            if self.caches.states is not None:
                self.caches.confirm_states(sequence.table, tokens)
            sequence.confirmed = tokens

    def fail(self, sequence: Sequence) -> None:
        """After a result that was not finite, of a sequence that may have been preempted since:
        any of its pages may be why."""
        self.caches.retract(sequence.table, sequence.chain)

    def _publish(self, sequence: Sequence) -> None:
        """Enters full pages in the prefix cache, but for one whose last token is not read yet."""
        known = min(sequence.computed, len(sequence.tokens))
        sequence.extend_chain(known)
        first, full = sequence.published, known // PAGE_SIZE
        if full > first:
            self.caches.publish(sequence.table, first, sequence.chain[first:full])
            sequence.published = full

    def _decode(self, ready: list[Sequence], budget: int, work: list[Work]) -> int:
        """A row for each, the common case: most have room in their last page. Draft tokens are
        more rows, as many as no prompt is kept out by. Returns the rows."""
        rows, preemptions, decode = 0, self.preemptions, Kind.DECODE
        spare = self.spare(budget) if self.speculation else 0
        for sequence in ready:
            if rows == budget:
                break
            if self.preemptions != preemptions and sequence not in self.running:
                continue
            count, drafts = 1, NO_DRAFTS
            if spare > 0:
                drafts = self._drafts(sequence, spare)
                spare -= len(drafts)
                count += len(drafts)
            start = sequence.computed
            if start + count <= sequence.table.pages * PAGE_SIZE:
                work.append(Work(sequence, start, count, decode, drafts))
            else:
                count = self._continue(sequence, count, work, drafts)
            rows += count
        return rows

    def spare(self, budget: int) -> int:
        """Rows of a step with so many left that may be draft tokens: each has a state of its own
        where there are recurrent layers."""
        rows = min(budget, self.max_step_tokens // 2) - self.max_running
        return rows if self.caches.states is None else min(rows, self.caches.states.drafts)

    def draftable(self, sequence: Sequence, most: int) -> int:
        """Draft tokens that it may have, `most` at most: rows of a step end where a state may be
        kept of recurrent layers."""
        if self.caches.states is None:
            return most
        return min(most, BOUNDARY - 1 - sequence.computed % BOUNDARY)

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Takes the pages for what a draft head keeps of so many tokens behind the computed ones,
        as far as drafts may take them. -> tokens that have pages"""
        table, tokens = sequence.table, sequence.computed + count
        if tokens > table.tokens:
            if not self.caches.fits(table, tokens, len(self.running)):
                return max(0, table.tokens - sequence.computed)
            self.caches.grow(table, tokens)
        return count

    def _drafts(self, sequence: Sequence, spare: int) -> Items[int]:
        """Draft tokens of a sequence, `spare` at most. They take a page only while each running
        sequence could take one beside it, or a decode of this step would preempt for it."""
        if self.speculation is None or sequence.pending:
            return NO_DRAFTS
        most, table = self.draftable(sequence, spare), sequence.table
        drafts = self.speculation.draft(sequence, most)
        tokens, room = sequence.computed + 1 + len(drafts), table.tokens - sequence.computed - 1
        if len(drafts) <= room or self.caches.fits(table, tokens, len(self.running)):
            return drafts
        return drafts[: max(0, room)]

    def _bounded(self, ready: list[Sequence], penalised: int) -> list[Sequence]:
        """Those that decode in this step: where all have penalties of more tokens than the cache
        has, as those that share pages may, some wait. Who waited longest is first, and one alone
        always fits. `penalised` are the pages of those tokens."""
        self._step += 1
        self._penalised_left = self.caches.total
        if penalised <= self._penalised_left:
            self._penalised_left -= penalised
            return ready
        waiting = set[Sequence]()
        for sequence in sorted(ready, key=lambda each: each.penalised_in):
            if sequence.penalised > self._penalised_left:
                waiting.add(sequence)
            elif sequence.has_penalties:
                self._penalised_left -= sequence.penalised
                sequence.penalised_in = self._step
        return [sequence for sequence in ready if sequence not in waiting]

    def _chunk(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        """Rows of a prompt, without its last one where no more penalties fit into this step."""
        rows = self._cut(sequence, sequence.computed, budget)
        if sequence.has_penalties and rows == sequence.uncomputed:
            if sequence.penalised > self._penalised_left:
                rows -= 1
                if (cut := self._image_cut(sequence, sequence.computed + rows)) is not None:
                    rows = cut.start - sequence.computed
            else:
                self._penalised_left -= sequence.penalised
                sequence.penalised_in = self._step
        taken = self._continue(sequence, rows, work) if rows else 0
        self._room = 0 if taken else self._room
        return taken

    def _cut(self, sequence: Sequence, start: int, budget: int) -> int:
        """Rows of a prompt from `start` on that a step computes. With recurrent layers each chunk
        but the last one ends where the rule's chunks do, so that a cold prompt and one from a
        snapshot are computed alike."""
        uncomputed = sequence.length - start
        rows = min(uncomputed, budget)
        if self.images is not None:
            rows = self.images.limit(sequence, start, rows, self._room)
        if self.caches.states is not None and rows < uncomputed:
            rows -= rows % BOUNDARY
        return rows

    def _image_cut(self, sequence: Sequence, end: int) -> Image | None:
        return None if self.images is None else self.images.cuts(sequence, end)

    def _match(self, sequence: Sequence) -> PageTable:
        """What the prefix cache has of it, up to where a step may begin."""
        sequence.extend_chain(len(sequence.tokens))
        matched = self.caches.match(sequence.chain[: max(0, sequence.cacheable) // PAGE_SIZE])
        while (cut := self._image_cut(sequence, matched.tokens)) is not None:
            self.caches.release(matched)
            matched = self.caches.match(sequence.chain[: cut.start // PAGE_SIZE])
        return matched

    def _continue(
        self, sequence: Sequence, count: int, work: list[Work], drafts: Items[int] = NO_DRAFTS
    ) -> int:
        busy: set[int] = set()
        while not self.caches.grow(sequence.table, sequence.computed + count):
            busy = busy or {id(item.sequence) for item in work}
            victim = next(s for s in reversed(self.running) if id(s) not in busy)
            self._preempt(victim)
            if victim is sequence:
                return 0
        several = sequence.uncomputed > 1 or sequence.length == sequence.image_end
        kind = Kind.PROMPT if several else Kind.DECODE
        work.append(Work(sequence, sequence.computed, count, kind, drafts))
        return count

    def _admit(self, sequence: Sequence, budget: int, work: list[Work], at: int = 0) -> int | None:
        """Starts a sequence that waits behind `at` others if its whole prompt fits, theirs and a
        page for each running sequence beside it. Returns the rows it takes in this step, None if it
        does not fit. One with images may take none: they are encoded for sequences that run."""
        matched = self._match(sequence)
        others = sum(pages_for(len(self.waiting[each].tokens)) for each in range(at))
        fits = self.caches.fits(matched, len(sequence.tokens), len(self.running) + others)
        # One that would get no rows keeps its snapshot, and others' pages, for the next step.
        rows = self._cut(sequence, matched.tokens, budget) or sequence.pictures is not None
        if not (fits and rows) or self._shares_too_much(sequence, matched):
            self.caches.release(matched)
            return None
        del self.waiting[at]
        self.running[sequence] = None
        sequence.request_index = self._request_indices.pop()
        self.caches.admit(matched, sequence.chain, len(sequence.tokens))
        sequence.table = matched
        sequence.computed = sequence.begun = matched.pages * PAGE_SIZE
        sequence.published = matched.pages
        if sequence.waited is None:
            sequence.cached = sequence.computed
            self._starting = True
        return self._chunk(sequence, budget, work)

    def _end_wait(self, work: list[Work]) -> None:
        """Of sequences with their first rows: a step may have cut off all rows of one that it
        admitted."""
        now = time.monotonic()
        for sequence, *_ in work:
            if sequence.waited is None:
                sequence.waited = now - sequence.submitted
        self._starting = any(each.waited is None for each in self.running)

    def _shares_too_much(self, sequence: Sequence, matched: PageTable) -> bool:
        """Whether page tables would have more pages beside it than is reserved for."""
        if not (matched.pages and self.running):
            return False
        others = sum(each.table.held for each in self.running)
        own = self.caches.most_held(len(sequence.tokens))
        return others + own > SHARED_TABLES * self.caches.total

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its output tokens and prompt logprobs are kept."""
        del self.running[sequence]
        self._release(sequence)
        self.waiting.appendleft(sequence)
        sequence.preemptions += 1
        sequence.proposer = None  # the memory of those of running sequences is counted
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._request_indices.append(sequence.request_index)
        if sequence.computed == sequence.confirmed:  # no step writes to its last page any more
            self.caches.confirm(sequence.table, sequence.table.pages - 1, sequence.table.pages)
        computed, confirmed = sequence.computed, sequence.confirmed
        self.caches.release_state(sequence.table, computed, confirmed, sequence.chain)
        self.caches.release(sequence.table)
        sequence.table = PageTable()
        sequence.computed = sequence.published = sequence.confirmed = 0


def _trim_to_wave(work: list[Work], multiple: int, images: Images | None) -> None:
    """Shortens the last prompt chunks of a large step until its rows fill whole waves of GEMM
    tiles; called while prompts queue. The rows cut off cost a whole wave here, and almost nothing
    in the next step, which is full anyway. Prompts never lose most of their rows: where decodes
    alone exceed the last whole wave, they would get one row a step. A chunk's rest is a `multiple`
    of rows, with all of an image that is not cut."""
    rows = sum(chunk.rows for chunk in work)
    prompts = sum(chunk.rows for chunk in work if chunk.kind is Kind.PROMPT)
    over = rows % WAVE if rows > WAVE else 0
    if 2 * over > prompts:
        return
    for at in range(len(work) - 1, -1, -1):
        chunk = work[at]
        if not over:
            break
        if chunk.kind is Kind.PROMPT:
            rows = max(0, chunk.rows - over) // multiple * multiple
            cut = None if images is None else images.cuts(chunk.sequence, chunk.start + rows)
            if cut is not None:
                rows = cut.end - chunk.start
            over = max(0, over - chunk.rows + rows)
            left = chunk._replace(rows=rows)
            work[at : at + 1] = [left] if left.rows else []
