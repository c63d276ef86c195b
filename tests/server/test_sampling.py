"""The draw: right distribution, right filters, the same for the same seed whoever sits beside."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import engine, finish
from hypothesis import given
from hypothesis import strategies as st

from kvline_server.engine import penalties
from kvline_server.engine.request import SamplingParams, Sequence
from kvline_server.engine.sampling import sample, uniform
from kvline_server.kernels.torch import TorchKernels

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def sequences(count: int, tokens: list[int] | None = None, **params: Any) -> list[Sequence]:
    out = []
    for seed in range(count):
        made = SamplingParams(max_tokens=10, seed=seed, **params)
        said = tokens or []
        out.append(Sequence(seed, [5, *said], 1, made))
    return out


def draw(count: int = 4000, logits: torch.Tensor = LOGITS, **params: Any) -> np.ndarray:
    rows = logits.expand(count, -1).clone()
    return sample(TorchKernels(), rows, sequences(count, **params)).numpy()


def shares(chosen: np.ndarray) -> np.ndarray:
    return np.bincount(chosen, minlength=len(LOGITS)) / len(chosen)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    want = torch.softmax(LOGITS / temperature, dim=-1).numpy()
    assert np.abs(shares(draw(temperature=temperature)) - want).max() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_no_temperature_is_greedy_and_no_nan(temperature: float) -> None:
    assert (draw(50, temperature=temperature) == 0).all()


def test_top_k_keeps_k_and_their_proportions() -> None:
    got = shares(draw(top_k=2))
    want = torch.softmax(LOGITS[:2], dim=-1).numpy()
    assert got[2:].sum() == 0
    assert np.abs(got[:2] - want).max() < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.softmax(LOGITS, dim=-1)
    p = float(probabilities[:2].sum()) + 0.01  # two are not enough
    assert set(np.flatnonzero(shares(draw(top_p=p)))) == {0, 1, 2}
    assert set(np.flatnonzero(shares(draw(top_p=1e-6)))) == {0}


def test_min_p_is_relative_to_the_best() -> None:
    kept = torch.softmax(LOGITS, dim=-1) >= 0.3 * torch.softmax(LOGITS, dim=-1).max()
    assert set(np.flatnonzero(shares(draw(min_p=0.3)))) == set(np.flatnonzero(kept.numpy()))


def test_filters_larger_than_the_vocabulary_change_nothing() -> None:
    assert (draw(200, top_k=1_000_000) == draw(200)).all()


def test_frequency_and_presence_push_down_what_was_said() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert draw(1, tokens=[0], frequency_penalty=2.0, **greedy)[0] == 1
    assert draw(1, tokens=[0], presence_penalty=1.5, **greedy)[0] == 1
    assert draw(1, tokens=[0, 0, 0], frequency_penalty=0.4, **greedy)[0] == 1
    assert draw(1, tokens=[0], frequency_penalty=0.4, **greedy)[0] == 0


def test_repetition_counts_the_prompt_too() -> None:
    logits = torch.tensor([1.0, 0.9, 0.0, 0.0, 0.0, 1.2])
    assert draw(1, logits, temperature=0.0)[0] == 5
    assert draw(1, logits, temperature=0.0, repetition_penalty=2.0)[0] == 0


def test_bias_bans_and_forces() -> None:
    assert draw(1, temperature=0.0, logit_bias={0: -100.0})[0] == 1
    assert draw(1, temperature=0.0, logit_bias={5: 100.0})[0] == 5
    everything = dict.fromkeys(range(6), -100.0)
    assert 0 <= draw(1, logit_bias=everything)[0] < 6  # H29: no NaN, no crash


def by_definition(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    p, out = sequence.params, logits.clone()
    for token in set(sequence.tokens):
        value = out[token]
        up = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        said = sequence.tokens[sequence.prompt_length :].count(token)
        out[token] = up - p.presence_penalty * (said > 0) - p.frequency_penalty * said
    for token, bias in p.logit_bias.items():
        out[token] += bias
    return out


requests = st.tuples(
    st.lists(st.integers(0, 39), min_size=1, max_size=30),
    st.lists(st.integers(0, 39), max_size=30),
    st.sampled_from([1.0, 0.7, 1.3]),
    st.sampled_from([0.0, 0.4, -0.2]),
    st.sampled_from([0.0, 0.3]),
    st.dictionaries(st.integers(0, 39), st.floats(-5, 5), max_size=3),
)


@given(st.lists(requests, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_batch_s_penalties_are_each_row_s_by_definition(
    asked: list[tuple[list[int], list[int], float, float, float, dict[int, float]]],
    rng: random.Random,
) -> None:
    """Applied after some tokens and again after all of them: the tally only hears what is new."""

    def params(rep: float, pres: float, freq: float, bias: dict[int, float]) -> SamplingParams:
        return SamplingParams(
            max_tokens=99,
            repetition_penalty=rep,
            presence_penalty=pres,
            frequency_penalty=freq,
            logit_bias=bias,
        )

    made = [
        Sequence(id, [*prompt], len(prompt), params(rep, pres, freq, bias))
        for id, (prompt, _, rep, pres, freq, bias) in enumerate(asked)
    ]
    logits = torch.tensor([[rng.gauss(0, 3) for _ in range(40)] for _ in asked])
    for part in (slice(0, 7), slice(7, None)):
        for sequence, (_, said, *_) in zip(made, asked, strict=True):
            sequence.tokens += said[part]
        got = logits.clone()
        penalties.apply(TorchKernels(), got, made)
        want = torch.stack([by_definition(*pair) for pair in zip(logits, made, strict=True)])
        assert torch.allclose(got, want, atol=1e-5)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_uniforms_are_in_range_and_repeat(seed: int, counter: int) -> None:
    seeds, counters = np.array([seed], np.uint64), np.array([counter], np.uint64)
    value = uniform(seeds, counters)[0]
    assert 0 <= value < 1
    assert value == uniform(seeds, counters)[0]


def test_uniforms_are_uniform_over_seeds_and_over_counters() -> None:
    many = np.arange(20_000, dtype=np.uint64)
    for values in (uniform(many, many * 0), uniform(many * 0, many)):
        histogram = np.histogram(values, bins=20, range=(0, 1))[0] / len(many)
        assert np.abs(histogram - 0.05).max() < 0.01


def test_a_tiny_chance_is_never_taken_from_rounding() -> None:
    """Tokens of probability zero must not be drawn, even when the draw is next to one."""
    logits = torch.full((4000, 6), float("-inf"))
    logits[:, 2] = 0.0
    assert (sample(TorchKernels(), logits, sequences(4000)) == 2).all()


def test_a_seeded_request_says_the_same_alone_in_company_and_after_preemption(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("llama")
    mine = SamplingParams(max_tokens=30, temperature=0.9, seed=42, ignore_eos=True)
    other = SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True)
    said = []
    for pages, company in ((60, 0), (60, 3), (9, 2)):
        made = engine(folder, pages=pages)
        for id in range(company):
            made.submit(id + 1, [(9 * id + i) % 200 for i in range(30)], other)
        made.submit(0, list(range(40, 70)), mine)
        said.append([o.token for o in finish(made)[0]])
    assert said[0] == said[1] == said[2]
