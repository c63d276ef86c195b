"""Penalties and logit biases of a batch, applied on the device at (row, token) pairs.

Presence and frequency penalties are OpenAI's and count output tokens; the repetition penalty is
CTRL's (Keskar et al. 2019) and counts the prompt too. Each sequence keeps its token counts, so a
step costs the host a few array operations per request, whatever its length.
"""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.engine.request import Sequence
from kvline_server.engine.token_counts import TokenCounts
from kvline_server.kernels.interface import Kernels


def apply(kernels: Kernels, logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Applies penalties and biases in place. logits [rows, vocabulary], one row per sequence"""
    flat, vocabulary = logits.view(-1), logits.shape[1]
    penalised = [(row, s, _counts(s)) for row, s in enumerate(sequences) if s.params.has_penalties]
    if penalised:
        lengths = [len(counts.ids) for _, _, counts in penalised]
        params = np.asarray(
            [
                (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                for p in (s.params for _, s, _ in penalised)
            ],
            dtype=np.float32,
        )
        repetition, presence, frequency = np.repeat(params, lengths, axis=0).T
        output = np.concatenate([counts.output for _, _, counts in penalised])
        less = np.where(output > 0, presence + frequency * output, np.float32(0))
        pairs = np.concatenate([row * vocabulary + counts.ids for row, _, counts in penalised])
        at, factor, subtracted = kernels.upload(pairs, np.ascontiguousarray(repetition), less)
        values = flat[at].float()
        values = torch.where(values > 0, values / factor, values * factor) - subtracted
        flat[at] = values.to(logits.dtype)
    biased = [(row, s.params.logit_bias) for row, s in enumerate(sequences) if s.params.logit_bias]
    if biased:
        pairs = np.concatenate([row * vocabulary + np.fromiter(b, np.int64) for row, b in biased])
        added = np.concatenate([np.fromiter(b.values(), np.float32) for _, b in biased])
        at, bias = kernels.upload(pairs, added)
        flat[at] = (flat[at].float() + bias).to(logits.dtype)


def _counts(sequence: Sequence) -> TokenCounts:
    if sequence.counts is None:
        prompt = sequence.prompt_length if sequence.params.repetition_penalty != 1.0 else 0
        sequence.counts = TokenCounts(sequence.tokens[:prompt], sequence.prompt_length)
    sequence.counts.update(sequence.tokens)
    return sequence.counts
