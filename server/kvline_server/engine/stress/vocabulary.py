"""What the LM head adds to the largest steps: a row of another kind beside those that are sampled,
changes to the logits of each rank's tokens, and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvline_server.engine.stress.bounds import Bounds
from kvline_server.model import shard
from kvline_server.worker.step import LogitsEdits, Step, TokenMasks, mask_words

# How one row of those that are sampled together differs. Rows that are alike are sampled in place;
# beside another kind they are copied, and ranks sample each kind in another way.
Other = dict[str, float]
ALIKE: Other = {}
GREEDY: Other = {"temperatures": 0.0}
UNFILTERED: Other = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def beside(step: Step, other: Other, chunk: int) -> Step:
    """With `other` values in the metadata of the first of the sampled rows that the LM head gets at
    once, `chunk` rows, where it is not the only one."""
    scored, sampled = len(step.targets), len(step.sampled_requests)
    ends = [*range(-scored % chunk, sampled, chunk), sampled]
    starts = [0, *ends]
    rows = [start for start, end in zip(starts, ends, strict=False) if end - start > 1]
    metadata = step.sampling_metadata.at(np.arange(sampled))
    for name, value in other.items():
        getattr(metadata, name)[rows] = value
    return replace(step, sampling_metadata=metadata)


def masked(step: Step, bounds: Bounds) -> Step:
    """With a mask of each sampled row, as where all requests have a grammar. It allows everything:
    what is forbidden takes no less."""
    sampled = len(step.sampled_requests)
    words = np.full(sampled * mask_words(bounds.vocabulary), -1, np.int32)
    masks = TokenMasks(np.arange(sampled), words)
    return replace(step, constraints=replace(step.constraints, masks=masks))


def on_every_rank(step: Step, bounds: Bounds) -> Step:
    """As many edits of each rank's tokens as the step has of all: those of requests may all be of
    the tokens of one rank, whichever that is."""
    if bounds.ranks == 1:
        return step
    every = (shard.Shard(rank, bounds.ranks) for rank in range(bounds.ranks))
    own = [shard.tokens(bounds.vocabulary, each) for each in every]
    edits = tuple(_of_each(edits, own) for edits in step.constraints.logits_edits)
    return replace(step, constraints=replace(step.constraints, logits_edits=edits))


def _of_each(edits: LogitsEdits, own: list[range]) -> LogitsEdits:
    """Each row's number of edits in the tokens of each range, or all of these."""
    rows, counts = np.unique(edits.rows, return_counts=True)
    found = [np.arange(r.start, min(r.start + n, r.stop)) for n in counts for r in own]
    of_rows = np.repeat(np.repeat(rows, len(own)), [len(each) for each in found])
    ones = np.ones(len(of_rows), np.float32)
    return LogitsEdits(
        rows=of_rows,
        tokens=np.concatenate(found),
        factors=ones * edits.factors.max(),
        subtracted=ones * edits.subtracted.max(),
    )
