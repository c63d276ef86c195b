"""Tokens that two computations draw from the same logits but for their last bits (near.py): greedy,
or by the same noise. Only where two candidates are that near to one another may they differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import torch
from near import TOLERANCE

from kvline_server.engine.request import Sequence
from kvline_server.engine.sampling import sampling_metadata
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.layout import SamplingMetadata
from kvline_server.kernels.torch_sampling import TorchSampling


def may_come(
    logits: torch.Tensor,
    draw: SamplingMetadata,
    token: int,
    instead: int,
    tolerance: float = TOLERANCE,
) -> bool:
    """Whether a draw from a row of logits that gives `instead` gives `token` where no logit moves
    by more than the tolerance: as the better of the two, or at the edge of a filter."""
    others = torch.tensor([token], device=logits.device)
    return any_may_come(logits, draw, others, instead, tolerance)


def any_may_come(
    logits: torch.Tensor,
    draw: SamplingMetadata,
    others: torch.Tensor,
    instead: int,
    tolerance: float = TOLERANCE,
) -> bool:
    """The same of several tokens, int64 [n], in one draw."""
    count = len(others)
    rows = logits.float().repeat(count, 3, 1)
    rows[:, 0] -= tolerance
    rows[:, 1] -= tolerance * (logits > logits[others].unsqueeze(1))
    rows[:, 2, logits > logits[instead]] += tolerance
    rows[:, 2, instead] -= tolerance
    rows[torch.arange(count), :, others] = (logits[others] + tolerance).unsqueeze(1).float()
    drawn = TorchSampling().choose(rows.flatten(0, 1), draw.at(np.zeros(3 * count, np.int64)))
    return bool((drawn.view(count, 3) == others.unsqueeze(1)).any())


def same_draws(
    got: torch.Tensor,
    want: torch.Tensor,
    logits: torch.Tensor,
    draw: SamplingMetadata,
    tolerance: float,
) -> None:
    """A token of each row, or NO_TOKEN."""
    for row, (one, other) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
        if one != other:
            assert min(one, other) >= 0, f"row {row} has {one} and not {other}"
            tie = may_come(logits[row], draw.at(np.array([row])), one, other, tolerance)
            assert tie, f"row {row} has {one} and not {other}"


def draw_of(params: SamplingParams, at: int) -> SamplingMetadata:
    """That of a request's output token `at`."""
    return sampling_metadata([Sequence(0, [0] * (1 + at), 1, params)])


def same_tokens(
    got: Items[int],
    want: Items[int],
    params: SamplingParams,
    logits: torch.Tensor,
    tolerance: float = TOLERANCE,
) -> int:
    """Of one request by two engines, and the logits of each draw of `want`. Returns how many tokens
    are the same: from a tie on, the engines go on with different texts."""
    for at, (one, other) in enumerate(zip(got, want, strict=False)):
        if one != other:
            tie = may_come(logits[at], draw_of(params, at), one, other, tolerance)
            assert tie, f"token {at} is {one} and not {other}"
            return at
    assert len(got) == len(want), "one side ended first"
    return len(want)


def mostly_same(same: Iterable[int], count: int, least: float = 0.95) -> None:
    """What same_tokens returned in a test, of how many tokens. Behind a tie nothing is compared, so
    a test that many of them end early shows nothing. Where tokens are few, one tie takes many."""
    found = sum(same)
    assert found >= least * count, f"{found} of {count} tokens were compared, the rest follow ties"


def settled(
    tokens: Items[int], params: SamplingParams, logits: torch.Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Whether no draw can give another token, so that texts may be compared exactly."""
    every = torch.arange(logits.shape[-1])
    return not any(
        any_may_come(row, draw_of(params, at), every[every != token], token, tolerance)
        for at, (token, row) in enumerate(zip(tokens, logits, strict=True))
    )
