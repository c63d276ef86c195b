"""A row gets only tokens whose bit is set, on one rank and on several: after penalties and biases,
before filters. Logprobs are of the logits as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import engine, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import forbid, mask_one, masks
from test_vocabulary import metadata_of, on_ranks, own

from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_sampling import TorchSampling
from kvline_server.model.shard import Shard, tokens
from kvline_server.worker.step import MASK_BITS, LogitsEdits, TokenMasks

SIZE = 307


def drawn(rng: np.random.Generator, rows: int, masked: int) -> TokenMasks:
    """Some tokens, and one at least, of some of the rows."""
    some = np.sort(rng.choice(rows, masked, replace=False)).tolist()
    counts = rng.integers(1, SIZE, masked).tolist()
    return masks({r: rng.choice(SIZE, n) for r, n in zip(some, counts, strict=True)}, SIZE)


@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bits_are_applied_to_any_slice_of_the_vocabulary(
    seed: int, ranks: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    given = drawn(rng, 12, int(rng.integers(1, 12)))
    logits = torch.from_numpy(rng.normal(0, 3, (12, SIZE))).to(dtype)
    want = logits.clone()
    forbid(want, given)
    for part in (tokens(SIZE, Shard(rank, ranks)) for rank in range(ranks)):
        mine = logits[:, part.start : part.stop].clone()
        at, words = TorchKernels().upload(given.rows, given.within(part))
        TorchSampling().mask(mine, at, words, part.start % MASK_BITS)
        assert torch.equal(mine, want[:, part.start : part.stop])


@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(0, 12))
def test_a_chunk_of_rows_has_its_masks(seed: int, one: int, other: int) -> None:
    given = drawn(np.random.default_rng(seed), 12, 5)
    first, last = sorted((one, other))
    logits = torch.zeros(12, SIZE)
    want = logits.clone()
    forbid(want, given)
    chunk = logits[first:last]
    forbid(chunk, given.between(first, last))
    assert torch.equal(chunk, want[first:last])


@settings(max_examples=25)
@given(st.sampled_from([1, 2, 3, 7]), st.integers(0, 10**6), st.booleans())
def test_tokens_are_allowed_ones_and_the_same_on_all_ranks(
    ranks: int, seed: int, filters: bool
) -> None:
    """As where the forbidden ones had no logit, also where all of a rank's tokens are forbidden."""
    rng, rows = np.random.default_rng(seed), 10
    logits = torch.from_numpy(rng.normal(0, 3, (rows, SIZE)).astype(np.float32))
    given = drawn(rng, rows, 6)
    narrow = masks({int(given.rows[-1]): [int(rng.integers(SIZE))]}, SIZE)  # of one rank's
    words = given.words.copy()
    words[-len(narrow.words) :] = narrow.words
    given = TokenMasks(given.rows, words)
    metadata = metadata_of(rng, rows, filters)
    masked = logits.clone()
    forbid(masked, given)
    first, *others = on_ranks(
        ranks, SIZE, lambda part: part.sample(own(logits, part), metadata, (), given)
    )
    assert all(torch.equal(first, other) for other in others)
    assert masked.gather(1, first.unsqueeze(1)).isfinite().all()
    if ranks == 1:
        assert torch.equal(first, TorchSampling().choose(masked, metadata))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_bias_does_not_bring_back_what_is_forbidden(ranks: int) -> None:
    logits = torch.zeros((2, SIZE))
    ones = np.ones(2, np.float32)
    edits = LogitsEdits(np.arange(2), np.array([40, 40]), ones, -90 * ones)
    metadata = metadata_of(np.random.default_rng(0), 2, filters=False)
    metadata.temperatures[:] = 0.0
    given = masks({1: [41, 300]}, SIZE)
    for got in on_ranks(
        ranks, SIZE, lambda part: part.sample(own(logits, part), metadata, (edits,), given)
    ):
        assert got.tolist() == [40, 41]


def test_logprobs_are_of_logits_without_a_mask(tiny_model: Path) -> None:
    """Of the tokens that are allowed, and alternatives may be others: as without a mask, once the
    text is the same."""
    asked = SamplingParams(8, temperature=0.0, ignore_eos=True, logprobs=20)
    allowed, made = range(60, 90), engine(tiny_model)
    mask_one(made, 1, allowed, SIZE)
    made.submit(1, [5, 6, 7, 8], asked)
    masked = finish(made)[1]
    output = [token for each in masked for token in each.tokens]
    assert len(output) == 8 and {*output} <= {*allowed}
    made = engine(tiny_model)
    scored = SamplingParams(1, temperature=0.0, ignore_eos=True, prompt_logprobs=20)
    made.submit(2, [5, 6, 7, 8, *output], scored)
    (plain,) = [each.prompt_scores for each in finish(made)[2] if each.prompt_scores is not None]
    got = np.concatenate([each.scores.values for each in masked if each.scores is not None])
    np.testing.assert_allclose(got, plain.values[-8:], atol=2e-5)
    tops = np.concatenate([each.scores.top_ids for each in masked if each.scores is not None])
    assert not np.isin(tops, allowed).all(), "of the whole vocabulary"
    assert tops[0, 0] == plain.top_ids[-8, 0]
