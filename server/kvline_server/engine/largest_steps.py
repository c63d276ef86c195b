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

from kvline_server.engine.batch import Batch, build
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Work
from kvline_server.kernels.routing import Played
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.sampling_params import MAX_BIASES, SamplingParams

# Rows of the short chunks, or one less than the context has pages: FlashInfer's fa2 runs those over
# an fp8 cache, and has a kernel each for up to 16, up to 64 and more rows, times the queries of a
# key-value head. CUDA loads a kernel when it first runs: these numbers reach all that service does.
SHORT = (2, 8, 32, 128)

MakeBatch = Callable[[Played], Batch]
Rows = tuple[int, int]  # length of a sequence, and the first position that the step computes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """Under these settings; `pages` are those of the KV cache, the dummy page included. With
    `aliased` page tables may repeat them, for as many tokens in all. A CPU has no kernels for
    `short_chunks` alone, which would be 3 of 25 s of SmolLM2's start."""

    max_running_requests: int
    max_prefill_tokens: int
    max_top_logprobs: int
    max_model_len: int
    vocabulary: int
    pages: int
    aliased: int = 0  # tokens; 0: every page has its own
    short_chunks: bool = False

    def makers(self) -> Iterator[tuple[str, MakeBatch]]:
        """Name of each step's stage and what builds the step, for its sequences to live as long as
        in service: until its results are read. Those that fail soonest come first."""
        top = self.max_top_logprobs
        every = worst_params(self.vocabulary, top)
        plain = SamplingParams(1 << 30, ignore_eos=True, logprobs=top, prompt_logprobs=top)
        yield "prefill-one", partial(self._batch, self._prefill(1), every)
        yield "prefill-many", partial(self._batch, self._prefill(self._running), every)
        yield "last-chunk", partial(self._batch, self._last_chunk(self.max_prefill_tokens), every)
        most = min(self.max_prefill_tokens, max(2, pages_for(self._longest) - 1))
        for rows in SHORT if self.short_chunks else ():
            yield "short-chunks", partial(self._batch, self._last_chunk(min(rows, most)), every)
        yield "decode", partial(self._batch, self._decode(), every)
        yield "mixed", partial(self._batch, self._mixed(), every)
        # Sampling without filters uses other kernels.
        yield "unfiltered", partial(self._batch, self._mixed(), plain)

    @property
    def _running(self) -> int:
        """The number of sequences that run at once with at least one page each."""
        return max(1, min(self.max_running_requests, self._capacity // PAGE_SIZE))

    @property
    def _capacity(self) -> int:
        """Tokens that the sequences of one step may have in total."""
        if self.aliased:
            return min(self.aliased, self.max_model_len * self.max_running_requests)
        return (self.pages - 1) * PAGE_SIZE

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.max_model_len, self._capacity)

    def _prefill(self, sequences: int) -> list[Rows]:
        """Prompt tokens alone, from at least `sequences` prompts."""
        chunk = min(self.max_prefill_tokens, self._capacity)
        longest = min(self.max_model_len, max(2, chunk // sequences))
        count = min(chunk // longest, self._capacity // PAGE_SIZE // pages_for(longest))
        return [(longest, 0)] * count or [(chunk, 0)]

    def _last_chunk(self, rows: int) -> list[Rows]:
        return [(self._longest, max(0, self._longest - rows))]

    def _decode(self) -> list[Rows]:
        """One token per sequence: the first has the full length, the others share what is left."""
        others = self._running - 1
        first = min(self.max_model_len, self._capacity - others * PAGE_SIZE)
        return [(first, first - 1), *self._sharing(others, first)]

    def _mixed(self) -> list[Rows]:
        """All sequences but one decode, and one prompt fills the rest of the step."""
        decodes = self._running - 1
        left = self._capacity - decodes * PAGE_SIZE
        prompt = min(self.max_model_len, self.max_prefill_tokens - decodes, left)
        return [*self._sharing(decodes, prompt), (prompt, 0)]

    def _sharing(self, decodes: int, taken: int) -> list[Rows]:
        """Decodes of equal lengths in what a sequence of `taken` tokens leaves."""
        share = (self._capacity - pages_for(taken) * PAGE_SIZE) // max(1, decodes)
        length = min(self.max_model_len, share // PAGE_SIZE * PAGE_SIZE)
        return [(length, length - 1)] * decodes

    def _batch(self, rows: list[Rows], params: SamplingParams, routing: Played) -> Batch:
        real = range(DUMMY_PAGE + 1, self.pages)
        pages = itertools.cycle(real) if self.aliased else iter(real)
        longest = max(length for length, _ in rows)
        ids = [i % self.vocabulary for i in range(longest + len(rows))]
        work = []
        for index, (length, start) in enumerate(rows):
            tokens = ids[index : index + length]
            prompt = max(1, length - 1)
            sequence = Sequence(id=-1, tokens=tokens, prompt_length=prompt, params=params)
            sequence.pages = array("i", itertools.islice(pages, pages_for(length)))
            sequence.computed = start
            work.append(Work(sequence, start, length - start))
        written = sum(item.rows for item in work)
        cleared = itertools.cycle(real) if real else ()  # of a step, as many as it may take
        made = build(work, list(itertools.islice(cleared, pages_for(written) + len(work))))
        return replace(made, step=replace(made.step, routing=routing))
