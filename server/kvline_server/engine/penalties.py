"""Penalties and logit biases of sampled rows, as edits of (row, token) pairs.

Presence and frequency penalties are OpenAI's and count output tokens; the repetition penalty is
CTRL's (Keskar et al. 2019) and counts the prompt too. Each sequence keeps its token counts, so a
step costs the host a few array operations per request, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from kvline_server.engine.request import Sequence
from kvline_server.engine.token_counts import TokenCounts
from kvline_server.worker.step import Edits


def edits(sequences: Rows[Sequence]) -> tuple[Edits, ...]:
    """Penalties, then biases, which may be of the same tokens. One sampled row per sequence."""
    penalised = [(row, s) for row, s in enumerate(sequences) if s.has_penalties]
    biased = [(row, s.params.logit_bias) for row, s in enumerate(sequences) if s.params.logit_bias]
    found = [_penalties(penalised)] if penalised else []
    return (*found, _biases(biased)) if biased else tuple(found)


def _penalties(penalised: list[tuple[int, Sequence]]) -> Edits:
    counts = [_counts(sequence) for _, sequence in penalised]
    lengths = [len(each.ids) for each in counts]
    params = np.asarray(
        [
            (row, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for row, p in ((row, s.params) for row, s in penalised)
        ],
        dtype=np.float32,
    )
    rows, repetition, presence, frequency = np.repeat(params, lengths, axis=0).T
    output = np.concatenate([each.output for each in counts])
    return Edits(
        rows=rows.astype(np.int64),
        tokens=np.concatenate([each.ids for each in counts]),
        factors=np.ascontiguousarray(repetition),
        subtracted=np.where(output > 0, presence + frequency * output, np.float32(0)),
    )


def _biases(biased: list[tuple[int, dict[int, float]]]) -> Edits:
    rows = np.repeat([row for row, _ in biased], [len(b) for _, b in biased]).astype(np.int64)
    return Edits(
        rows=rows,
        tokens=np.concatenate([np.fromiter(b, np.int64) for _, b in biased]),
        factors=np.ones(len(rows), np.float32),
        subtracted=np.concatenate([-np.fromiter(b.values(), np.float32) for _, b in biased]),
    )


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        prompt = sequence.prompt_length if sequence.params.repetition_penalty != 1.0 else 0
        sequence.counts = TokenCounts(sequence.tokens[:prompt], sequence.prompt_length)
    sequence.counts.update(sequence.tokens)
    return sequence.counts
