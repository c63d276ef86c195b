"""Penalties and logit biases of sampled rows, as edits of (row, token) pairs.

Presence and frequency penalties are OpenAI's and count output tokens; the repetition penalty is
CTRL's (Keskar et al. 2019) and counts the prompt too. Each sequence keeps its token counts, so a
step costs the host a few array operations per request, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from kvline_server.engine.request import Sequence
from kvline_server.worker.step import LogitsEdits


def logits_edits(sequences: Rows[Sequence]) -> tuple[LogitsEdits, ...]:
    """Penalties, then biases, which may be of the same tokens. One sampled row per sequence."""
    penalised = [(row, s) for row, s in enumerate(sequences) if s.has_penalties]
    biased = [(row, s.params.logit_bias) for row, s in enumerate(sequences) if s.params.logit_bias]
    found = [_penalties(penalised)] if penalised else []
    return (*found, _biases(biased)) if biased else tuple(found)


def _penalties(penalised: list[tuple[int, Sequence]]) -> LogitsEdits:
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
    return LogitsEdits(
        rows=rows.astype(np.int64),
        tokens=np.concatenate([each.ids for each in counts]),
        factors=np.ascontiguousarray(repetition),
        subtracted=np.where(output > 0, presence + frequency * output, np.float32(0)),
    )


def _biases(biased: list[tuple[int, dict[int, float]]]) -> LogitsEdits:
    rows = np.repeat([row for row, _ in biased], [len(b) for _, b in biased]).astype(np.int64)
    return LogitsEdits(
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


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated, as arrays that grow with
    the output, ready for one copy to the device."""

    def __init__(self, prompt: list[int], skip: int) -> None:
        """`prompt` are tokens that count as present, but not as output; the first `skip` tokens of
        the sequence are no output."""
        self._ids = _distinct(np.fromiter(prompt, np.int64, count=len(prompt)))
        self._output = np.zeros(len(self._ids), dtype=np.float32)
        self._prompt = self._size = len(self._ids)
        self._index: dict[int, int] = {}  # of output tokens
        self._counted = skip

    @property
    def ids(self) -> np.ndarray:
        """int64 [n], distinct token ids"""
        return self._ids[: self._size]

    @property
    def output(self) -> np.ndarray:
        """float32 [n], how often each was generated"""
        return self._output[: self._size]

    def update(self, tokens: list[int]) -> None:
        """Counts the tokens that the sequence gained since the last call."""
        for token in tokens[self._counted :]:
            at = self._index.get(token)
            if at is None:
                at = self._index[token] = self._find(token)
            self._output[at] += 1
        self._counted = len(tokens)

    def _find(self, token: int) -> int:
        at = int(np.searchsorted(self._ids[: self._prompt], token))
        if at < self._prompt and self._ids[at] == token:
            return at
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate((self._ids, np.zeros(room, self._ids.dtype)))
            self._output = np.concatenate((self._output, np.zeros(room, self._output.dtype)))
        self._ids[self._size] = token
        self._size += 1
        return self._size - 1


def _distinct(ids: np.ndarray) -> np.ndarray:
    """In order. np.unique makes a hash table, which takes longer for a long prompt."""
    ids.sort()
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    distinct: np.ndarray = ids[first]
    return distinct
