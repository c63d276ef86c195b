"""A step of the stress set as those of requests are built.

While probing, page tables repeat a few physical pages, so that full lengths run with little memory;
at the final size every sequence has its own pages.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from kvline_server.engine.batch import Batch, build
from kvline_server.engine.request import Sequence
from kvline_server.engine.stress.bounds import Bounds, Span
from kvline_server.engine.stress.vocabulary import ALIKE, Other, beside, masked, on_every_rank
from kvline_server.engine.work import Kind, Work
from kvline_server.ipc.sampling_params import MAX_BIASES, SamplingParams
from kvline_server.kernels.layout import Spans
from kvline_server.memory.caches import GroupPages, PageTable
from kvline_server.memory.groups import first_page
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for
from kvline_server.memory.states import BOUNDARY, DUMMY_SLOT, StateStep


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


# Draft tokens go with every other option.
UNEDITED: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


def batch(
    bounds: Bounds, spans: list[Span], other: Other = ALIKE, params: SamplingParams | None = None
) -> Batch:
    """With `other` sampling of one row in each chunk of the LM head. Without `params` each sequence
    has every option, but for those that no draft tokens go with."""
    asked = params or worst_params(bounds.vocabulary, bounds.max_top_logprobs)
    unedited = structs.replace(asked, **UNEDITED)
    real = [range(DUMMY_PAGE + 1, count) for count in bounds.pages]
    pages = [itertools.cycle(each) if bounds.aliased else iter(each) for each in real]
    longest = max(span.tokens for span in spans)
    ids = [i % bounds.vocabulary for i in range(longest + len(spans))]
    work, kept = [], itertools.count(1 + bounds.max_running_requests)
    ahead = itertools.count(1 + bounds.max_running_requests + bounds.snapshots)
    for index, (length, start, rows, drafts) in enumerate(spans):
        tokens = ids[index : index + length]
        decode = rows == 1 < length == start + 1 or drafts > 0
        known = length - drafts
        sequence = Sequence(
            id=-1,
            tokens=tokens[:known],
            prompt_length=max(1, known - 1) if decode else length,
            params=unedited if drafts else asked,
        )
        count = pages_for(start + rows)
        firsts = [first_page(window, start // PAGE_SIZE) for window in bounds.windows]
        held = [
            GroupPages(first, array("i", itertools.islice(some, count - first)))
            for first, some in zip(firsts, pages, strict=True)
        ]
        sequence.table = PageTable(tuple(held), count)
        if bounds.recurrent:
            own = _states(bounds, 1 + index, start, rows, kept)
            each = (1 + index, *itertools.islice(ahead, drafts))
            sequence.table.step = own._replace(slot=each[-1], each=each if drafts else ())
        sequence.computed = start
        kind = Kind.DECODE if decode else Kind.PROMPT
        work.append(Work(sequence, start, rows, kind, tokens[known:]))
    written = sum(item.rows for item in work)
    most = pages_for(written) + len(work)  # pages that a step may take, and clear
    made = build(work, [list(itertools.islice(itertools.cycle(each), most)) for each in real])
    step = on_every_rank(beside(made.step, other, bounds.logprob_rows), bounds)
    return replace(made, step=masked(step, bounds))


def with_images(bounds: Bounds, spans: list[Span], tokens: int, text: int = 0) -> Batch:
    """Prompts whose rows are images' of so many tokens, each in one step, behind `text` other rows;
    what is left of a prompt's rows is another image's."""
    made = batch(bounds, spans)
    layout = made.step.layout
    prompts = layout.row_starts[layout.decodes :]
    inside = np.arange(prompts[0], prompts[-1], text + tokens, dtype=np.int32)
    at = np.unique(np.concatenate((prompts, inside)))
    begins, ends = np.minimum(at[:-1] + text, at[1:]), at[1:]
    some = begins < ends
    whole = replace(layout, spans=Spans(begins[some], ends[some]))
    return replace(made, step=replace(made.step, layout=whole))


def _states(bounds: Bounds, slot: int, start: int, rows: int, kept: Iterator[int]) -> StateStep:
    """With as many snapshots of a prompt as service makes of one, as long as there are slots for
    `kept` ones."""
    last = rows // BOUNDARY * BOUNDARY
    behind = [at for at in dict.fromkeys((BOUNDARY, last)) if 0 < at <= rows]
    snapshots = [(at, next(kept)) for at in behind]
    end = 1 + bounds.max_running_requests + bounds.snapshots
    few = tuple(each for each in snapshots if each[1] < end)
    return StateStep(slot, slot if start else DUMMY_SLOT, few)
