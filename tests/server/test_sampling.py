"""Sampling: the right distribution and filters, and seeded output that no batch changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Drawn
from engines import engine, finish
from hypothesis import given
from hypothesis import strategies as st
from ties import mostly_same, same_tokens

from kvline_server.engine import penalties
from kvline_server.engine.request import Sequence
from kvline_server.engine.sampling import sampling_metadata
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.ipc.seeds import keys
from kvline_server.kernels.noise import gumbel_max
from kvline_server.kernels.torch import TorchKernels
from kvline_server.worker.vocabulary import Vocabulary, apply

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def sequences(count: int, tokens: list[int] | None = None, **params: Any) -> list[Sequence]:
    out = []
    for seed in range(count):
        made = SamplingParams(max_tokens=10, seed=seed, **params)
        out.append(Sequence(seed, [5, *(tokens or [])], 1, made))
    return out


def sample(logits: torch.Tensor, sampled: list[Sequence]) -> torch.Tensor:
    vocabulary = Vocabulary(TorchKernels(), logits.shape[1])
    return vocabulary.sample(logits, sampling_metadata(sampled), penalties.logits_edits(sampled))


def draw(count: int = 4000, logits: torch.Tensor = LOGITS, **params: Any) -> np.ndarray:
    rows = logits.expand(count, -1).clone()
    drawn: np.ndarray = sample(rows, sequences(count, **params)).numpy()
    return drawn


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


def test_frequency_and_presence_penalise_output_tokens() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert draw(1, tokens=[0], frequency_penalty=2.0, **greedy)[0] == 1
    assert draw(1, tokens=[0], presence_penalty=1.5, **greedy)[0] == 1
    assert draw(1, tokens=[0, 0, 0], frequency_penalty=0.4, **greedy)[0] == 1
    assert draw(1, tokens=[0], frequency_penalty=0.4, **greedy)[0] == 0


def test_repetition_counts_the_prompt_too() -> None:
    logits = torch.tensor([1.0, 0.9, 0.0, 0.0, 0.0, 1.2])
    assert draw(1, logits, temperature=0.0)[0] == 5
    assert draw(1, logits, temperature=0.0, repetition_penalty=2.0)[0] == 0


@pytest.mark.fault("H29", shows="every token at -100: a token of the vocabulary is drawn, no NaN")
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
        count = sequence.tokens[sequence.prompt_length :].count(token)
        out[token] = up - p.presence_penalty * (count > 0) - p.frequency_penalty * count
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
    """Applied after some tokens and again after all: counts are updated with the new ones only."""

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
        for sequence, (_, output, *_) in zip(made, asked, strict=True):
            sequence.tokens += output[part]
        got = logits.clone()
        for edits in penalties.logits_edits(made):
            apply(TorchKernels(), got, edits)
        want = torch.stack([by_definition(*pair) for pair in zip(logits, made, strict=True)])
        assert torch.allclose(got, want, atol=1e-5)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_keys_repeat_and_neighbours_differ(seed: int, counter: int) -> None:
    seeds = np.array([seed, seed ^ 1, seed, seed], np.uint64)
    made = keys(seeds, np.array([counter, counter, counter + 1, counter], np.uint64))
    assert made[0] == made[3]
    assert len(set(made.tolist())) == 3


@pytest.mark.parametrize("of", ["seeds", "counters", "tokens"])
def test_gumbel_max_gives_each_token_its_probability(of: str) -> None:
    """Chi-squared over 40,000 draws: over seeds, over a sequence's steps, and (tokens) over 50
    ids far apart in a vocabulary of 50,000, between which all weights are 0."""
    many, ids = 40_000, np.arange(0, 50_000, 1000)
    weights = np.linspace(1, 9, 50, dtype=np.float32)
    wide = of == "tokens"
    count = 4000 if wide else many
    row = torch.zeros(50_000 if wide else 50)
    row[torch.from_numpy(ids) if wide else slice(None)] = torch.from_numpy(weights)
    steps = np.arange(count, dtype=np.uint64)
    drawn = keys(steps * (of != "counters"), steps * (of == "counters"))
    won = np.concatenate(
        [gumbel_max(row.expand(len(part), -1).clone(), part) for part in np.array_split(drawn, 40)]
    )
    seen = np.bincount(won // 1000 if wide else won, minlength=50)
    expected = count * weights / weights.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 95  # 49 degrees of freedom: p = 1e-4


def test_two_rows_noise_is_unrelated() -> None:
    """Neighbouring seeds, counters and ids: no correlation beyond chance among 100,000 numbers."""
    one = np.ones((2, 100_000), np.float32)
    for pair in (
        keys(np.array([5, 6], np.uint64), np.zeros(2, np.uint64)),
        keys(np.zeros(2, np.uint64), np.array([5, 6], np.uint64)),
        np.array([5, 6], np.uint64),
        np.array([5, 5 + (1 << 32)], np.uint64),
    ):
        noise = torch.from_numpy(one.copy())
        gumbel_max(noise, pair)
        a, b = np.log(noise.numpy())
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.015
        assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.015
        assert abs(a.mean() - 0.5772) < 0.02  # Gumbel's mean


def test_a_tiny_chance_is_never_taken_from_rounding() -> None:
    """Tokens of probability zero must not be drawn, even when the draw is next to one."""
    logits = torch.full((4000, 6), float("-inf"))
    logits[:, 2] = 0.0
    assert (sample(logits, sequences(4000)) == 2).all()


def test_a_seeded_output_is_the_same_alone_in_a_batch_and_after_preemption(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("llama")
    mine = SamplingParams(max_tokens=30, temperature=0.9, seed=42, ignore_eos=True)
    other = SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True)
    outputs, alone = [], engine(folder, pages=60)
    drawn = Drawn(alone)
    for made, company in ((alone, 0), (engine(folder, pages=60), 3), (engine(folder, pages=9), 2)):
        for id in range(company):
            made.submit(id + 1, [(9 * id + i) % 200 for i in range(30)], other)
        made.submit(0, list(range(40, 70)), mine)
        outputs.append([token for o in finish(made)[0] for token in o.tokens])
    logits = drawn.logits(mine, 30)
    same = [same_tokens(tokens, outputs[0], mine, logits) for tokens in outputs[1:]]
    mostly_same(same, 2 * 30, least=0.5)


def test_a_dense_tail_does_not_turn_rounding_into_another_token() -> None:
    """Seeded rows over 49,152 tokens, and the same with logits moved by 2e-5, as other requests
    of a batch do. An inverse of the cumulated distribution turns that into other tokens."""
    torch.manual_seed(8)
    logits = torch.randn(200, 49_152)
    moved = logits + 2e-5 * torch.randn_like(logits)
    uniforms = torch.rand(200, 1)
    one, other = (inverse(rows, uniforms) for rows in (logits, moved))
    assert (one != other).any(), "the rows are too easy to show anything"
    sampled = sequences(200, temperature=1.0)
    first, second = (sample(rows, sampled) for rows in (logits, moved))
    assert (first == second).all()


def inverse(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The draw that a seed must not be given: one number looked up in the cumulated weights."""
    cumulated = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cumulated, uniforms * cumulated[:, -1:])


def test_a_thousand_seeded_tokens_alone_are_those_of_a_busy_batch(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("llama")
    mine = {
        seed: SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(50)
    }
    rng = random.Random(5)
    alone, quiet = {}, engine(folder)
    drawn = Drawn(quiet)
    busy = engine(folder, pages=3000, running=32, step=512)
    for seed, params in mine.items():
        quiet.submit(seed, [seed, 7, 5], params)
        alone[seed] = [token for o in finish(quiet)[seed] for token in o.tokens]
        busy.submit(seed, [seed, 7, 5], params)
    for id in range(100, 140):
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 200))]
        other = SamplingParams(
            rng.randint(1, 60), seed=id, ignore_eos=True, top_k=rng.choice([0, 9])
        )
        busy.submit(id, prompt, other)
    together = finish(busy)
    same = []
    for seed, params in mine.items():
        tokens = [token for o in together[seed] for token in o.tokens]
        same.append(same_tokens(tokens, alone[seed], params, drawn.logits(params, 20)))
    mostly_same(same, 1000)
