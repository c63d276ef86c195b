"""Comparisons of other tests: a tie passes either way, a real difference fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from near import FEW, TOLERANCE, flips, same_ranking, same_ranks, same_values
from ties import draw_of, may_come, mostly_same, same_draws, same_tokens, settled

from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.torch_sampling import TorchSampling

TIED, APART = 1e-6, 1e-3  # logits' distances
GREEDY = SamplingParams(9, temperature=0.0)
IDS = np.array([[4, 9, 2]])
VALUES = np.array([[-1.0, -1.0 - TIED, -3.0]])


def row(first: float, second: float) -> torch.Tensor:
    made = torch.full((8,), -90.0)
    made[2], made[5] = first, second
    return made


def test_tokens_may_differ_at_a_tie_alone_and_what_follows_is_not_compared() -> None:
    logits = torch.stack([row(1.0, 0.0), row(1.0, 1.0 - TIED), row(1.0, 0.0)])
    assert same_tokens([2, 2, 2], [2, 2, 2], GREEDY, logits) == 3
    assert same_tokens([2, 5, 7], [2, 2, 2], GREEDY, logits) == 1
    assert same_tokens([2, 5], [2, 2, 2], GREEDY, logits) == 1, "another text may end elsewhere"
    for wrong in ([5, 2, 2], [2, 7, 2], [2, 2, 5], [2, 2], [2, 2, 2, 2]):
        with pytest.raises(AssertionError):
            same_tokens(wrong, [2, 2, 2], GREEDY, logits)
    logits[1] = row(1.0, 1.0 - APART)
    with pytest.raises(AssertionError, match="token 1 is 5 and not 2"):
        same_tokens([2, 5, 7], [2, 2, 2], GREEDY, logits)


def test_a_test_whose_tokens_mostly_follow_ties_shows_nothing() -> None:
    mostly_same([20, 18, 0], 40)
    mostly_same([4, 0], 8, least=0.5)
    for same, least in (([20, 17, 0], 0.95), ([0, 0], 0.5), ([], 0.5)):
        with pytest.raises(AssertionError, match="of 40 tokens were compared"):
            mostly_same(same, 40, least)


FILTERS: list[dict[str, Any]] = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.5}, {}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drawn_tokens_may_differ_where_noise_or_a_filter_is_at_a_tie(
    filters: dict[str, Any],
) -> None:
    """Without a filter one logit is moved until the noise makes both as likely to win."""
    seeds = [seed for seed in range(50) if other_wins(seed)]
    params = SamplingParams(9, seed=seeds[0], **filters)
    draw, second = draw_of(params, 0), 1.0
    if not filters:
        second = edge(draw)
    for distance, tied in ((TIED, True), (APART, False)):
        logits = row(1.0, second - distance)
        (instead,) = TorchSampling().choose(logits.repeat(1, 1), draw).tolist()
        assert may_come(logits, draw, 7 - instead, instead) == tied  # 2 or 5
        assert not may_come(logits, draw, 1, instead)
        assert settled([instead], params, logits[None]) != tied
        got, want = torch.tensor([7 - instead]), torch.tensor([instead])
        if tied:
            same_draws(got, want, logits[None], draw, TOLERANCE)
        else:
            with pytest.raises(AssertionError, match="row 0"):
                same_draws(got, want, logits[None], draw, TOLERANCE)
    with pytest.raises(AssertionError, match="row 0"):
        same_draws(torch.tensor([-1]), want, logits[None], draw, TOLERANCE)


def other_wins(seed: int) -> bool:
    """Whether the second of two equal tokens is drawn, as a filter would prevent."""
    draw = draw_of(SamplingParams(9, seed=seed), 0)
    return TorchSampling().choose(row(1.0, 1.0).repeat(1, 1), draw).tolist() == [5]


def edge(draw: Any) -> float:
    """The second logit from which on the second token is drawn."""
    low, high = -20.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        wins = TorchSampling().choose(row(1.0, middle).repeat(1, 1), draw).tolist() == [5]
        low, high = (low, middle) if wins else (middle, high)
    return high


def test_a_ranking_may_differ_at_a_tie_alone() -> None:
    same_ranking((IDS, VALUES), (IDS, VALUES))
    swapped = np.array([[9, 4, 2]])
    same_ranking((swapped, VALUES), (IDS, VALUES))
    same_ranking((swapped[:, :1], VALUES[:, :1]), (IDS, VALUES))
    same_ranking((IDS[:, :1], VALUES[:, :1]), (swapped[:, :1], VALUES[:, :1]))
    same_ranking((IDS[:, :0], VALUES[:, :0]), (IDS, VALUES))


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        ([4, 2, 9], [-1.0, -1.0, -3.0]),  # an order that is none
        ([4, 7, 2], [-1.0, -1.0, -3.0]),  # 7 may not have been left out, and 9 is missing
        ([4, 9, 9], [-1.0, -1.0, -3.0]),
        ([4, 9, 2], [-1.0, -1.0, -3.0 + APART]),
        ([9, 4, 2], [-1.0 - TIED, -1.0, -3.0]),  # not sorted by its own values
        ([2], [-1.0]),
    ],
)
def test_another_candidate_value_or_order_is_a_difference(
    ids: list[int], values: list[float]
) -> None:
    with pytest.raises(AssertionError):
        same_ranking((np.array([ids]), np.array([values])), (IDS, VALUES))


def test_a_rank_may_differ_by_those_that_are_tied_with_it() -> None:
    for rank in (1, 2):
        same_ranks(np.array([rank]), VALUES[:, 1], VALUES)
    same_ranks(np.array([3]), VALUES[:, 2], VALUES)
    for rank, column in ((0, 1), (3, 1), (2, 2), (4, 2)):
        with pytest.raises(AssertionError, match="too"):
            same_ranks(np.array([rank]), VALUES[:, column], VALUES)


def test_values_are_near_to_one_another_whatever_their_size() -> None:
    same_values([1000.0, 0.0], [1000.0 + TIED, TIED])
    with pytest.raises(AssertionError):
        same_values([1000.0, 0.0], [1000.0 + APART, 0.0])


def test_flips_of_a_cache_are_few_single_steps_of_its_first_layer_that_differs() -> None:
    want = np.full((3, 20), 0x38, np.uint8)
    want[1, 5] = 0x00
    got = want.copy()
    assert flips(got, want) == 0, "nothing differs"
    got[1, 5] = 0x81  # through zero, whose sign is none
    got[2] = 0x10
    assert flips(got, want) == 1
    got[1, :FEW] = 0x39
    assert flips(got, want) == 0, "too many"
    got[1] = want[1]
    got[1, 0] = 0x3A
    assert flips(got, want) == 0, "two steps"
