"""The stress set: the largest batches that the scheduler can produce.

They run through the same batch builder and workers as requests. While probing, page tables repeat a
few physical pages, so that full lengths run with little memory; at the final size every sequence
has its own pages.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvline_server.engine.batch import build
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Work
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.parallel.executor import Executor
from kvline_server.sampling_params import SamplingParams
from kvline_server.sizing.settings import EngineSettings

MAX_BIASES = 300  # per request; the API's limit


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


@dataclass(frozen=True, slots=True)
class StressSet:
    executor: Executor
    settings: EngineSettings
    max_model_len: int
    vocabulary: int
    aliased: bool  # page tables may repeat physical pages

    def items(self) -> list[tuple[str, Callable[[], None]]]:
        """Name and action of each item; those that fail soonest come first."""
        top = self.settings.max_top_logprobs
        params = worst_params(self.vocabulary, top)
        plain = SamplingParams(1 << 30, ignore_eos=True, logprobs=top, prompt_logprobs=top)
        return [
            ("prefill-one", lambda: self._prefill(1, params)),
            ("prefill-many", lambda: self._prefill(self._running, params)),
            ("last-chunk", lambda: self._last_chunk(params)),
            ("decode", lambda: self._decode(params)),
            ("mixed", lambda: self._mixed(params)),
            # Sampling without filters uses other kernels.
            ("unfiltered", lambda: self._mixed(plain)),
        ]

    @property
    def _running(self) -> int:
        """The number of sequences that run at once with at least one page each."""
        return max(1, min(self.settings.max_running_requests, self._capacity // PAGE_SIZE))

    @property
    def _capacity(self) -> int:
        """Tokens that the sequences of one item may have in total."""
        if self.aliased:
            return self.max_model_len * self.settings.max_running_requests
        return (self.executor.pages - 1) * PAGE_SIZE

    def _prefill(self, sequences: int, params: SamplingParams) -> None:
        """A step full of prompt tokens, from at least `sequences` prompts."""
        chunk = min(self.settings.max_prefill_tokens, self._capacity)
        longest = min(self.max_model_len, max(2, chunk // sequences))
        lengths = [longest] * (chunk // longest)
        self._run([(length, 0, params) for length in lengths or [chunk]])

    def _last_chunk(self, params: SamplingParams) -> None:
        length = min(self.max_model_len, self._capacity)
        start = max(0, length - self.settings.max_prefill_tokens)
        self._run([(length, start, params)])

    def _decode(self, params: SamplingParams) -> None:
        """One token per sequence: the first has the full length, the others share what is left."""
        running = self._running
        first = min(self.max_model_len, self._capacity - (running - 1) * PAGE_SIZE)
        rest = 0
        if running > 1:
            share = (self._capacity - pages_for(first) * PAGE_SIZE) // (running - 1)
            rest = min(self.max_model_len, share // PAGE_SIZE * PAGE_SIZE)
        lengths = [first] + [rest] * (running - 1)
        self._run([(length, length - 1, params) for length in lengths])

    def _mixed(self, params: SamplingParams) -> None:
        """All sequences but one decode, and one prompt fills the rest of the step."""
        decodes = self._running - 1
        prompt = min(
            self.max_model_len,
            self.settings.max_prefill_tokens - decodes,
            self._capacity - decodes * PAGE_SIZE,
        )
        share = (self._capacity - pages_for(prompt) * PAGE_SIZE) // max(1, decodes)
        rest = min(self.max_model_len, share // PAGE_SIZE * PAGE_SIZE)
        self._run([(rest, rest - 1, params)] * decodes + [(prompt, 0, params)])

    def _run(self, shapes: list[tuple[int, int, SamplingParams]]) -> None:
        pages = self._pages()
        longest = max(length for length, _, _ in shapes)
        ids = [i % self.vocabulary for i in range(longest + len(shapes))]
        work = []
        for index, (length, start, params) in enumerate(shapes):
            tokens = ids[index : index + length]
            sequence = Sequence(
                id=-1, tokens=tokens, prompt_length=max(1, length - 1), params=params
            )
            sequence.pages = array("i", itertools.islice(pages, pages_for(length)))
            sequence.computed = start
            work.append(Work(sequence, start, length - start))
        self.executor.launch(build(work).step).wait()

    def _pages(self) -> Iterator[int]:
        real = range(DUMMY_PAGE + 1, self.executor.pages)
        return itertools.cycle(real) if self.aliased else iter(real)
