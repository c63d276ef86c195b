"""The next token of each sampled row.

Order: penalties and bias, temperature, top-k, top-p, min-p, then one draw from what is left. The
draw of a sequence's n-th token depends on its seed and n alone, so neither batch mates nor
preemption change what a seeded request says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvline_server.engine.request import Sequence

GREEDY = 1e-5  # temperatures below mean argmax: dividing by them would overflow
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(
    seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from (seed, counter): splitmix64 (Steele, Lea, Flood 2014), twice."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds) + counters)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> np.ndarray:
    """Token ids, one per row. May change `logits` in place. [rows, vocabulary] -> int64 [rows]"""
    for row, sequence in enumerate(sequences):
        if sequence.params.penalised:
            _penalise(logits[row], sequence)
    temperatures = np.asarray([s.params.temperature for s in sequences])
    chosen = logits.argmax(dim=-1).numpy()
    drawn = np.flatnonzero(temperatures >= GREEDY)
    if drawn.size:
        picked = [sequences[i] for i in drawn]
        rows = logits if drawn.size == len(sequences) else logits[torch.from_numpy(drawn)]
        chosen[drawn] = _draw(rows, picked, temperatures[drawn])
    return chosen


def _draw(logits: torch.Tensor, sequences: list[Sequence], temperatures: np.ndarray) -> np.ndarray:
    scale = torch.from_numpy(temperatures).to(logits.dtype).unsqueeze(1)
    probabilities = torch.softmax(logits.div_(scale), dim=-1)
    for row, sequence in enumerate(sequences):
        p = sequence.params
        if p.top_k or p.top_p < 1.0 or p.min_p > 0.0:
            _filter(probabilities[row], p.top_k, p.top_p, p.min_p)
    cumulated = torch.cumsum(probabilities, dim=-1, out=logits)
    total = cumulated[:, -1:]
    draws = uniform(
        np.asarray([s.params.seed & 0xFFFFFFFFFFFFFFFF for s in sequences], dtype=np.uint64),
        np.asarray([s.output_length for s in sequences], dtype=np.uint64),
    )
    wanted = torch.from_numpy(draws).to(logits.dtype).unsqueeze(1) * total
    # Strictly below the total, or rounding could point past the last token with any probability.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, wanted, right=True).squeeze(1).numpy()


def _filter(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Zeroes what top-k, then top-p of the rest, then min-p leave out. [vocabulary], in place"""
    vocabulary = probabilities.shape[0]
    count = min(top_k, vocabulary) if top_k else vocabulary
    values, ids = probabilities.topk(count)
    keep = torch.ones(count, dtype=torch.bool)
    if top_p < 1.0:
        before = values.cumsum(0) - values
        keep &= before < top_p * values.sum()
    if min_p > 0.0:
        keep &= values >= min_p * values[0]
    keep[0] = True
    kept = values * keep
    probabilities.zero_()
    probabilities[ids] = kept


def _penalise(logits: torch.Tensor, sequence: Sequence) -> None:
    """Penalties as OpenAI and CTRL (Keskar et al. 2019) define them. [vocabulary], in place"""
    p = sequence.params
    if p.repetition_penalty != 1.0:
        seen = torch.unique(torch.tensor(sequence.tokens))
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / p.repetition_penalty, values * p.repetition_penalty
        )
    if (p.presence_penalty or p.frequency_penalty) and sequence.output_length:
        said, counts = torch.unique(
            torch.tensor(sequence.tokens[sequence.prompt_length :]), return_counts=True
        )
        logits[said] -= p.presence_penalty + p.frequency_penalty * counts.to(logits.dtype)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias))
        logits[ids] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype)
