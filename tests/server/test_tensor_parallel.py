"""Two, three and four ranks in processes of their own against one, over whole engine steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from near import FLIPPED, TOLERANCE, flips, same_ranking, same_ranks, same_values
from rank_cases import ALLOWED, CASES, MASKED, RANKS, REQUESTS, TOKENS, params
from ties import mostly_same, same_tokens
from waiting import limit

from kvline_contract.exits import ExitCode
from kvline_server.engine.request import Scores

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
PAIRS = [(name, ranks) for name, case in CASES.items() for ranks in case.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(HERE / "rank_cases.py"), str(made)]
    subprocess.run(command, env=environment, check=True, timeout=limit(110))
    return made


def read(folder: Path, name: str, ranks: int, rank: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}-{ranks}-{rank}.npz") as found:
        return dict(found)


@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_ranks_give_one_rank_s_answers(folder: Path, name: str, ranks: int) -> None:
    """Greedy, seeded with filters and without, with penalties, biases and a mask; prompt
    logprobs."""
    want = read(folder, name, 1, 0)
    first = read(folder, name, ranks, 0)
    assert first.keys() == want.keys() - {f"{id}.logits" for id in REQUESTS}
    assert len(first["0.prompt.top_values"]) == 4 and first["1.prompt.top_ids"].shape == (69, 3)
    assert first["0.output.top_ids"].shape == (TOKENS, 20)
    assert first["2.output.top_ids"].shape == (TOKENS, 0)
    assert {*first[f"{MASKED}.tokens"].tolist()} <= {*ALLOWED}
    allowed = 0  # requests that have another number in their caches
    if "cache" in want:
        caches = [read(folder, name, ranks, rank)["cache"] for rank in range(ranks)]
        allowed = flips(np.concatenate(caches, axis=-2), want["cache"])
    same = []
    for id in REQUESTS:
        try:
            same.append(same_answer(first, want, id, TOLERANCE))
        except AssertionError:
            if not allowed:
                raise
            allowed -= 1
            same.append(same_answer(first, want, id, FLIPPED))
    mostly_same(same, len(REQUESTS) * TOKENS, least=0.75)


def same_answer(
    first: dict[str, np.ndarray], want: dict[str, np.ndarray], id: int, most: float
) -> int:
    """-> how many tokens are the same"""
    got, wanted = (made[f"{id}.tokens"].tolist() for made in (first, want))
    assert len(wanted) == TOKENS
    same = same_tokens(got, wanted, params(id), torch.from_numpy(want[f"{id}.logits"]), most)
    if f"{id}.prompt.values" in want:
        compare(first, want, f"{id}.prompt", len(want[f"{id}.prompt.values"]), most)
    if f"{id}.output.values" in want:
        compare(first, want, f"{id}.output", same, most)
    return same


def compare(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], name: str, rows: int, most: float
) -> None:
    """Tables of the first rows, of which `want` lists all candidates."""
    one, other = (
        Scores(*(made[f"{name}.{column}"][:rows] for column in Scores.__slots__))
        for made in (got, want)
    )
    assert np.array_equal(one.tokens, other.tokens)
    most = max(most, 5e-7 * float(np.abs(other.values).max(initial=0.0)))  # some are beyond 20
    same_values(one.values, other.values, most)
    same_ranks(one.ranks, other.values, other.top_values, most)
    same_ranking((one.top_ids, one.top_values), (other.top_ids, other.top_values), most)


@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_all_ranks_have_the_same_bits(folder: Path, name: str, ranks: int) -> None:
    """They schedule and embed from what they have, so none may differ."""
    first, *others = (read(folder, name, ranks, rank) for rank in range(ranks))
    for made in (first, *others):
        made.pop("cache", None)  # heads of its own
    for other in others:
        assert first.keys() == other.keys()
        assert all(np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_start_exchanges_nothing_until_ranks_run_together(folder: Path, ranks: int) -> None:
    """Trials of kernels give no byte to a collective. A warm-up does, to none that waits."""
    sent: dict[str, Any] = read(folder, "start", ranks, 0)
    assert sent["tune"] == 0 < sent["warm_up"]


@pytest.mark.parametrize(("how", "most"), [("ended", 10.0), ("silent", 3.0)])
def test_a_lost_rank_ends_the_others_in_time(folder: Path, how: str, most: float) -> None:
    found = json.loads((folder / how / "lost.json").read_text())
    assert found["code"] == int(ExitCode.RANK_LOST)
    assert found["seconds"] < most
    assert "rank 0 of 2 waits for another, in vain: " in found["text"]
    assert "\n" not in found["text"] and ".cc" not in found["text"]
