"""The largest steps that the scheduler can make, and short chunks: the stress set of sizing.

They are built as those of requests. While probing, page tables repeat a few physical pages, so that
full lengths run with little memory; at the final size every sequence has its own pages.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvline_server.engine.batch import Batch, build
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Work
from kvline_server.ipc.sampling_params import MAX_BIASES, SamplingParams
from kvline_server.kernels.routing import Played
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.model import shard
from kvline_server.worker.step import Edits, Step

# Rows of the short chunks, or one less than the context has pages: FlashInfer's fa2 runs those over
# an fp8 cache, and has a kernel each for up to 16, up to 64 and more rows, times the queries of a
# key-value head. CUDA loads a kernel when it first runs: these numbers reach all that service does.
SHORT = (2, 8, 32, 128)

MakeBatch = Callable[[Played], Batch]


class Part(NamedTuple):
    """Of a step: `rows` of a sequence's tokens from position `start` on. A single row is a decode,
    more are a prompt's, whose next token is sampled where they are its last."""

    tokens: int
    start: int
    rows: int


def worst_params(vocabulary: int, top: int) -> SamplingParams:
    """Every option of a request at once. The largest top_k needs the largest sort."""
    return SamplingParams(
        max_tokens=1 << 30,
        temperature=0.8,
        top_p=0.9,
        top_k=vocabulary,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={i * vocabulary // MAX_BIASES: -1.0 for i in range(MAX_BIASES)},
        ignore_eos=True,
        logprobs=top,
        prompt_logprobs=top,
    )


# How one row of those that are sampled together differs. Rows that are alike are sampled in place;
# beside another kind they are copied, and ranks sample each kind in another way.
Other = dict[str, float]
ALIKE: Other = {}
GREEDY: Other = {"temperatures": 0.0}
UNFILTERED: Other = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """Under these settings; `pages` are those of the KV cache, the dummy page included. With
    `aliased` page tables may repeat them, for as many tokens in all. A CPU has no kernels for
    `short_chunks` alone, which would be 3 of 25 s of SmolLM2's start. Where attention holds nothing
    for each row and token of its context, a `last_chunk` holds no more than other steps."""

    max_running_requests: int
    max_prefill_tokens: int
    max_top_logprobs: int
    max_model_len: int
    vocabulary: int
    pages: int
    logprob_rows: int  # that the LM head gets at once
    ranks: int = 1
    aliased: int = 0  # tokens; 0: every page has its own
    short_chunks: bool = False
    last_chunk: bool = True

    def makers(self) -> Iterator[tuple[str, MakeBatch]]:
        """Name of each step's stage and what builds the step, for its sequences to live as long as
        in service: until its results are read. Those that fail soonest come first."""
        top = self.max_top_logprobs
        every = worst_params(self.vocabulary, top)
        plain = SamplingParams(1 << 30, ignore_eos=True, logprobs=top, prompt_logprobs=top)
        yield "prefill-one", partial(self._batch, self._first_chunks(), every, ALIKE)
        yield "prefill-many", partial(self._batch, self._many_ends(), every, GREEDY)
        if self.last_chunk:
            yield "last-chunk", partial(self._batch, self._long_ends(), every, ALIKE)
        most = min(self.max_prefill_tokens, max(2, pages_for(self._longest) - 1))
        for rows in SHORT if self.short_chunks else ():
            chunk = Part(self._longest, self._longest - min(rows, most), min(rows, most))
            yield "short-chunks", partial(self._batch, [chunk], every, ALIKE)
        yield "decode", partial(self._batch, self._decodes(), every, ALIKE)
        yield "decode", partial(self._batch, self._sampled_at_once(), every, GREEDY)
        yield "mixed", partial(self._batch, self._mixed(), every, UNFILTERED)
        # Sampling without filters uses other kernels.
        yield "unfiltered", partial(self._batch, self._mixed(), plain, ALIKE)

    @property
    def _room(self) -> int:
        """Pages that the sequences of one step may have in total."""
        return self.aliased // PAGE_SIZE if self.aliased else self.pages - 1

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

    def _first_chunks(self) -> list[Part]:
        """Prompt tokens alone: whole prompts and the beginning of another, which has no row that is
        not scored. No step has more scored rows."""
        parts, left = list[Part](), self.max_prefill_tokens
        for length in self._fewest(left, 0):
            rows = min(length, left)
            left -= rows
            if rows:
                parts.append(Part(min(rows + 1, length), 0, rows))
        return parts

    def _many_ends(self) -> list[Part]:
        """The ends of all prompts that run at once and fill the cache: every row is scored or
        sampled, as many as can be are sampled, and the penalties are of all tokens of the cache."""
        lengths = self._shared(self._running, self._room)
        parts, left = list[Part](), self.max_prefill_tokens
        for index, length in enumerate(lengths):
            rows = min(length, -(-left // (len(lengths) - index)))
            left -= rows
            parts.append(Part(length, length - rows, rows))
        return parts

    def _long_ends(self) -> list[Part]:
        """The last chunk of the longest prompt, and where it is shorter than a step, of others. A
        token of each was computed before: only such chunks need a mask of their context."""
        parts, left = list[Part](), self.max_prefill_tokens
        for length in self._fewest(left, 1):
            rows = min(length - 1, left)
            left -= rows
            if rows:
                parts.append(Part(length, length - rows, rows))
        return parts

    def _decodes(self) -> list[Part]:
        """One token per sequence: the first has the full length, the others share what is left."""
        others = self._running - 1
        first = min(self.max_model_len, (self._room - others) * PAGE_SIZE)
        rest = self._shared(others, self._room - pages_for(first))
        return [Part(length, length - 1, 1) for length in (first, *rest)]

    def _sampled_at_once(self) -> list[Part]:
        """As many decodes as the LM head gets at once, which share all: no chunk has more edits."""
        lengths = self._shared(min(self._running, self.logprob_rows), self._room)
        return [Part(length, length - 1, 1) for length in lengths]

    def _mixed(self) -> list[Part]:
        """All sequences but one decode, and one prompt fills the rest of the step. It is computed
        from its first token on: with a long context this would take as long as the last chunk."""
        decodes = self._running - 1
        room = (self._room - decodes) * PAGE_SIZE
        prompt = min(self.max_model_len, self.max_prefill_tokens - decodes, room)
        rest = self._shared(decodes, self._room - pages_for(prompt))
        return [*(Part(n, n - 1, 1) for n in rest), Part(prompt, 0, prompt)]

    def _batch(
        self, parts: list[Part], params: SamplingParams, other: Other, routing: Played
    ) -> Batch:
        """With `other` sampling of one row in each chunk of the LM head."""
        real = range(DUMMY_PAGE + 1, self.pages)
        pages = itertools.cycle(real) if self.aliased else iter(real)
        longest = max(part.tokens for part in parts)
        ids = [i % self.vocabulary for i in range(longest + len(parts))]
        work = []
        for index, (length, start, rows) in enumerate(parts):
            tokens = ids[index : index + length]
            decode = rows == 1 < length == start + 1
            prompt = length - 1 if decode else length
            sequence = Sequence(id=-1, tokens=tokens, prompt_length=prompt, params=params)
            sequence.pages = array("i", itertools.islice(pages, pages_for(start + rows)))
            sequence.computed = start
            work.append(Work(sequence, start, rows))
        written = sum(item.rows for item in work)
        cleared = itertools.cycle(real) if real else ()  # of a step, as many as it may take
        made = build(work, list(itertools.islice(cleared, pages_for(written) + len(work))))
        step = self._on_every_rank(_beside(made.step, other, self.logprob_rows))
        return replace(made, step=replace(step, routing=routing))

    def _on_every_rank(self, step: Step) -> Step:
        """As many edits of each rank's tokens as the step has of all: those of requests may all be
        of the tokens of one rank, whichever that is."""
        if self.ranks == 1:
            return step
        every = (shard.Shard(rank, self.ranks) for rank in range(self.ranks))
        own = [shard.tokens(self.vocabulary, each) for each in every]
        return replace(step, edits=tuple(_of_each(edits, own) for edits in step.edits))


def _beside(step: Step, other: Other, chunk: int) -> Step:
    """With `other` values in the draws of the first of the sampled rows that the LM head gets at
    once, `chunk` rows, where it is not the only one."""
    scored, sampled = len(step.targets), len(step.sampled_slots)
    ends = [*range(-scored % chunk, sampled, chunk), sampled]
    starts = [0, *ends]
    rows = [start for start, end in zip(starts, ends, strict=False) if end - start > 1]
    draws = step.draws.at(np.arange(sampled))
    for name, value in other.items():
        getattr(draws, name)[rows] = value
    return replace(step, draws=draws)


def _of_each(edits: Edits, own: list[range]) -> Edits:
    """Each row's number of edits in the tokens of each range, or all of these."""
    rows, counts = np.unique(edits.rows, return_counts=True)
    found = [np.arange(r.start, min(r.start + n, r.stop)) for n in counts for r in own]
    of_rows = np.repeat(np.repeat(rows, len(own)), [len(each) for each in found])
    ones = np.ones(len(of_rows), np.float32)
    return Edits(
        rows=of_rows,
        tokens=np.concatenate(found),
        factors=ones * edits.factors.max(),
        subtracted=ones * edits.subtracted.max(),
    )
