"""What bounds the steps of service under some settings, and the most that sequences have of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kvline_server.engine.speculation import decode_rows
from kvline_server.kernels.recurrent import CHUNK
from kvline_server.kernels.tiles import SMALL
from kvline_server.memory.pages import PAGE_SIZE, pages_for

FEW = 1 + SMALL  # rows of the shortest prompt that a GPU computes by chunks


class Span(NamedTuple):
    """Of a step: `rows` of a sequence's tokens from position `start` on. A single row is a decode,
    with draft tokens each is a row more; others are a prompt's, whose next token is sampled where
    they are its last."""

    tokens: int
    start: int
    rows: int
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Settings, and the `pages` of the KV cache in each group of layers, the dummy page included.
    With `aliased` tokens page tables may repeat these, for so many in all."""

    max_running_requests: int
    max_prefill_tokens: int
    max_top_logprobs: int
    max_model_len: int
    vocabulary: int
    windows: tuple[int, ...]  # of each group
    pages: tuple[int, ...]
    logprob_rows: int  # that the LM head gets at once
    ranks: int = 1
    aliased: int = 0  # tokens; 0: every page has its own
    draft_tokens: int = 0
    recurrent: bool = False  # whether layers keep a state of each sequence
    snapshots: int = 0  # of such states
    draft_states: int = 0  # behind draft tokens

    @property
    def _room(self) -> int:
        """Pages that the sequences of one step may have in total."""
        return self.aliased // PAGE_SIZE if self.aliased else self.pages[0] - 1

    @property
    def _running(self) -> int:
        """The number of sequences that run at once with at least one page each."""
        return max(1, min(self.max_running_requests, self._room))

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.max_model_len, self._room * PAGE_SIZE)

    def _shared(self, sequences: int, room: int) -> list[int]:
        """The most tokens of each that so many sequences have in so many pages, the fewest first.
        Longer ones could only have more where others have fewer."""
        each, more = divmod(room, max(1, sequences))
        held = [each] * (sequences - more) + [each + 1] * more
        return [min(self.max_model_len, pages * PAGE_SIZE) for pages in held]

    def _fewest(self, rows: int, computed: int) -> list[int]:
        """Tokens of as few sequences as have so many rows beyond `computed` ones of each, or as
        have the most of all; the longest first."""

        def of(count: int) -> int:
            held, more = divmod(self._room, count)
            few, many = (min(self.max_model_len, n * PAGE_SIZE) for n in (held, held + 1))
            return min(rows, (count - more) * few + more * many - count * computed)

        enough = min(self._running, -(-rows // max(1, self._longest - computed)))
        if of(enough) < rows:
            enough = max(range(1, self._running + 1), key=of)
        return self._shared(enough, self._room)[::-1]

    def first_chunks(self) -> list[Span]:
        """Prompt tokens alone: whole prompts and the beginning of another, which has no row that is
        not scored. No step has more scored rows."""
        spans, left = list[Span](), self.max_prefill_tokens
        for length in self._fewest(left, 0):
            rows = min(length, left)
            left -= rows
            if rows:
                spans.append(Span(min(rows + 1, length), 0, rows))
        return spans

    def many_ends(self) -> list[Span]:
        """The ends of all prompts that run at once and fill the cache: every row is scored or
        sampled, as many as can be are sampled, and the penalties are of all tokens of the cache."""
        lengths = self._shared(self._running, self._room)
        spans, left = list[Span](), self.max_prefill_tokens
        for index, length in enumerate(lengths):
            rows = min(length, -(-left // (len(lengths) - index)))
            left -= rows
            spans.append(Span(length, length - rows, rows))
        return spans

    def many_chunks(self) -> list[Span]:
        """Whole prompts that have as many of the rule's chunks, with a row or more beyond FEW each,
        as any prompts of a step."""
        count = max(1, min(self._running, self.max_prefill_tokens // FEW, self._room))
        lengths, left = [FEW] * count, self.max_prefill_tokens - FEW * count
        for more in itertools.chain([1 + CHUNK - FEW], itertools.repeat(CHUNK)):
            for index in range(min(count, max(0, left) // more)):
                lengths[index], left = lengths[index] + more, left - more
            if left < more:
                break
        return self._whole(lengths)

    def many_snapshots(self) -> list[Span]:
        """Whole prompts of which each leaves a snapshot, as many as a step has rows for."""
        count = max(1, min(self._running, self.max_prefill_tokens // (1 + CHUNK)))
        return self._whole([1 + CHUNK] * count)

    def _whole(self, lengths: list[int]) -> list[Span]:
        """As much of these prompts as fits."""
        spans, left, room = list[Span](), self.max_prefill_tokens, self._room
        for wanted in lengths:
            length = min(wanted, self.max_model_len, left, room * PAGE_SIZE)
            if length <= 0:
                break
            left, room = left - length, room - pages_for(length)
            spans.append(Span(length, 0, length))
        return spans

    def long_ends(self) -> list[Span]:
        """The last chunk of the longest prompt, and where it is shorter than a step, of others. A
        token of each was computed before: only such chunks need a mask of their context."""
        spans, left = list[Span](), self.max_prefill_tokens
        for length in self._fewest(left, 1):
            rows = min(length - 1, left)
            left -= rows
            if rows:
                spans.append(Span(length, length - rows, rows))
        return spans

    def first_chunk(self, rows: int) -> list[Span]:
        """The first rows of the longest prompt."""
        return [Span(self._longest, 0, min(rows, self.max_prefill_tokens, self._longest))]

    def short_chunk(self, rows: int) -> list[Span]:
        """The last rows of the longest prompt: so many, or one less than it has pages, which need a
        mask of their context."""
        rows = min(rows, self.max_prefill_tokens, max(2, pages_for(self._longest) - 1))
        return [Span(self._longest, self._longest - rows, rows)]

    def decodes(self) -> list[Span]:
        """One token per sequence: the first has the full length, the others share what is left."""
        others = self._running - 1
        first = min(self.max_model_len, (self._room - others) * PAGE_SIZE)
        rest = self._shared(others, self._room - pages_for(first))
        return [Span(length, length - 1, 1) for length in (first, *rest)]

    def drafted(self) -> list[Span]:
        """All sequences decode and share the cache, with the most draft tokens; the first of
        several, which may have every option, has none."""
        lengths = self._shared(self._running, self._room)
        most = decode_rows(len(lengths), self.max_prefill_tokens, self.draft_tokens)
        spans, left = list[Span](), most - len(lengths)
        left = min(left, self.draft_states) if self.recurrent else left
        for length in lengths:
            alone = len(lengths) == 1
            drafts = min(left, self.draft_tokens, length - 1) if spans or alone else 0
            left -= drafts
            spans.append(Span(length, length - 1 - drafts, 1 + drafts, drafts))
        return spans

    def sampled_at_once(self) -> list[Span]:
        """As many decodes as the LM head gets at once, which share all: no chunk has more edits."""
        lengths = self._shared(min(self._running, self.logprob_rows), self._room)
        return [Span(length, length - 1, 1) for length in lengths]

    def mixed(self) -> list[Span]:
        """All sequences but one decode, and one prompt fills the rest of the step. It is computed
        from its first token on: with a long context this would take as long as the last chunk."""
        decodes = self._running - 1
        room = (self._room - decodes) * PAGE_SIZE
        prompt = min(self.max_model_len, self.max_prefill_tokens - decodes, room)
        rest = self._shared(decodes, self._room - pages_for(prompt))
        return [*(Span(n, n - 1, 1) for n in rest), Span(prompt, 0, prompt)]
