"""Penalties and biases of a batch, as pairs of row and token on the device.

Penalties are OpenAI's (presence, frequency) and CTRL's (Keskar et al. 2019: repetition, of the
prompt too). Each sequence keeps a tally, so a step costs the host a few array operations a request,
whatever its length.
"""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.engine.request import Sequence
from kvline_server.engine.tally import Tally
from kvline_server.kernels.interface import Kernels


def apply(kernels: Kernels, logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Changes the rows of sequences that asked for it. logits [rows, vocabulary], in place"""
    flat, vocabulary = logits.view(-1), logits.shape[1]
    tallied = [(row, s, _tally(s)) for row, s in enumerate(sequences) if s.params.tallied]
    if tallied:
        lengths = [len(tally.ids) for _, _, tally in tallied]
        params = np.asarray(
            [
                (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                for p in (s.params for _, s, _ in tallied)
            ],
            dtype=np.float32,
        )
        repetition, presence, frequency = np.repeat(params, lengths, axis=0).T
        said = np.concatenate([tally.said for _, _, tally in tallied])
        taken = np.where(said > 0, presence + frequency * said, np.float32(0))
        pairs = np.concatenate([row * vocabulary + tally.ids for row, _, tally in tallied])
        at, factor, less = kernels.upload(pairs, np.ascontiguousarray(repetition), taken)
        values = flat[at].float()
        values = torch.where(values > 0, values / factor, values * factor) - less
        flat[at] = values.to(logits.dtype)
    biased = [(row, s.params.logit_bias) for row, s in enumerate(sequences) if s.params.logit_bias]
    if biased:
        pairs = np.concatenate([row * vocabulary + np.fromiter(b, np.int64) for row, b in biased])
        more = np.concatenate([np.fromiter(b.values(), np.float32) for _, b in biased])
        at, bias = kernels.upload(pairs, more)
        flat[at] = (flat[at].float() + bias).to(logits.dtype)


def _tally(sequence: Sequence) -> Tally:
    if sequence.tally is None:
        asked = sequence.prompt_length if sequence.params.repetition_penalty != 1.0 else 0
        sequence.tally = Tally(sequence.tokens[:asked], sequence.prompt_length)
    sequence.tally.hear(sequence.tokens)
    return sequence.tally
