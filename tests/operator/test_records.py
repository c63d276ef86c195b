"""Recorded sizes: which are kept, which drifted, and how a damaged file is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.codec import ContractError
from kvline_contract.launch import MAX_RECORDS, Record, Records, Reuse
from kvline_contract.memory import MemoryV1
from kvline_contract.names import RECORDS_FILE
from kvline_contract.report import Attempt, Outcome, Result, SizingReport, Source, State
from kvline_operator.api.spec import Rollout
from kvline_operator.store import records

ROOT = Path(__file__).resolve().parents[2]
SPREAD = "kv-spread-percent-1536mib"  # of bench/spread.py
ISSUE_SPREAD = 3.04  # percent
MEMORY = MemoryV1(100, 20, 10, 0, 50, 10, 10).upgraded()


def result(tokens: int = 4096, print: str = "f" * 32, **more: Any) -> Result:
    base = Result(
        tokens, 512, Source.MEASURED, print, 90, 6000, 0, "2026-11-21T10:00:00Z", (MEMORY,)
    )
    return replace(base, **more)


def merge(
    kept: dict[str, Record], results: list[Result], attempts: tuple[Attempt, ...] = ()
) -> dict[str, Record]:
    """`attempts` are those of each replica."""
    return records.merge(
        kept,
        [
            SizingReport(
                "u", "p", "r", 1, State.VALIDATED, "t", "t", attempts=attempts, result=each
            )
            for each in results
        ],
    )


def test_a_search_is_kept_and_read_back_by_a_pod() -> None:
    kept = merge({}, [result()])
    written = records.text(kept, Reuse.AUTO)
    assert Records.parse(written).records == kept == records.read({"data": {RECORDS_FILE: written}})
    record = kept["f" * 32]
    assert (record.kv_tokens, record.free_mib, record.loop_ms) == (4096, 90, 6000)


@pytest.mark.parametrize("source", [Source.RECORDED, Source.PINNED])
def test_a_size_that_was_not_searched_for_is_no_record(source: Source) -> None:
    assert merge({}, [result(source=source)]) == {}


@pytest.mark.parametrize(
    ("second", "stays"), [(4000, 4000), (4096, 4096), (4200, 4096), (3900, 4096), (5000, 4096)]
)
def test_of_two_searches_the_smaller_stays_unless_it_drifted(second: int, stays: int) -> None:
    kept = merge(merge({}, [result(4096)]), [result(second)])
    assert kept["f" * 32].kv_tokens == stays
    drift = records.drifted(merge({}, [result(4096)])["f" * 32], result(second))
    assert drift == (abs(second - 4096) > 0.04 * 4096)


def test_what_counts_as_drift_is_above_what_starts_of_one_spec_differ_by() -> None:
    """By the largest spread that was measured; the issue's own, of 3.04 %, is of a run whose line
    is not in the results."""
    lines = (ROOT / "bench" / "results" / "results.jsonl").read_text().splitlines()
    found = [each["value"] for each in map(json.loads, lines) if each["name"] == SPREAD]
    assert 1.25 * max(*found, ISSUE_SPREAD) <= records.DRIFT_PERCENT
    allowed = 100 - Rollout().min_capacity_percent
    assert allowed > records.DRIFT_PERCENT, "a loss is BelowBaseline before it is a drift"


def test_a_size_taken_with_more_memory_free_replaces_one_from_beside_a_neighbour() -> None:
    """The smaller one stayed for ever: 8,752 tokens of 35,056."""
    beside, alone = result(8752, free_mib=400), result(35_056, free_mib=1000)
    for order in ([beside, alone], [alone, beside]):
        kept = merge({}, order)
        assert kept["f" * 32].kv_tokens == 35_056
    few = merge({}, [beside])["f" * 32]
    assert not records.drifted(few, replace(alone, source=Source.RECORDED))
    assert records.drifted(kept["f" * 32], beside)  # a loss that its service should know of


@pytest.mark.parametrize("free", [1000, 1009])
def test_a_smaller_size_taken_with_as_much_memory_free_has_drifted(free: int) -> None:
    """A neighbour came after free memory was read: new replicas started at 8,752 of 35,056."""
    kept = merge({}, [result(35_056, free_mib=1000)])
    beside = result(8752, free_mib=free)
    assert merge(kept, [beside]) == kept
    assert records.drifted(kept["f" * 32], beside)


FAILED = [Outcome.OUT_OF_MEMORY, Outcome.KILLED]


@pytest.mark.parametrize("outcome", FAILED)
def test_a_record_that_a_replica_tried_in_vain_is_replaced(outcome: Outcome) -> None:
    """It stayed for ever, and each start of every replica played it again."""
    kept = merge({}, [result(60_000)])
    searched = result(35_056)
    tried = (
        Attempt(1, 60_000, outcome),
        Attempt(0, 1024, Outcome.SURVIVED, 5),
        Attempt(2, 35_056, Outcome.SURVIVED, 5),
    )
    assert merge(kept, [searched])["f" * 32].kv_tokens == 60_000
    found = merge(kept, [searched], tried)
    assert found["f" * 32].kv_tokens == 35_056
    assert merge(found, [result(60_000), searched], tried) == found
    survived = (replace(tried[0], outcome=Outcome.SURVIVED), *tried[1:])
    assert merge(kept, [searched], survived) == kept
    beside = result(35_056, free_mib=50)  # it says nothing about as much memory as the record had
    assert merge(kept, [beside], tried) == kept
    assert merge(kept, [replace(searched, source=Source.RECORDED)], tried) == kept


SEARCHES = st.lists(
    st.tuples(
        st.integers(85, 115).map(lambda size: size * 1000),
        st.integers(90, 104),
        st.sampled_from([0, *FAILED]),
    ),
    min_size=1,
    max_size=6,
)


@given(SEARCHES, SEARCHES, st.randoms())
def test_the_same_results_change_the_records_once(
    before: list[tuple[int, int, Any]], found: list[tuple[int, int, Any]], random: Any
) -> None:
    """Three sizes replaced each other at every reconcile, which wrote each time: a hot loop."""

    def reports(made: list[tuple[int, int, Any]]) -> list[SizingReport]:
        return [
            SizingReport(
                "u",
                "p",
                "r",
                1,
                State.VALIDATED,
                "t",
                "t",
                attempts=(Attempt(1, tokens + 9000, outcome),) if outcome else (),
                result=result(tokens, free_mib=free, measured_at=f"t{number}"),
            )
            for number, (tokens, free, outcome) in enumerate(made)
        ]

    kept = records.merge({}, reports(before)) if random.random() < 0.5 else {}
    searched = reports(found)
    once = records.merge(kept, searched)
    for _ in range(3):
        random.shuffle(searched)
        assert records.merge(once, searched) == once


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ([], [(99_500, 10_007), (100_300, 10_014), (101_000, 10_016)]),
        ([(101_000, 10_016)], [(100_300, 10_014), (99_500, 10_007)]),
        ([(100_000, 90)], [(97_000, 90), (94_000, 90)]),  # each within the drift of the one before
    ],
)
def test_sizes_within_noise_of_each_other_do_not_replace_each_other(
    kept: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    def results(made: list[tuple[int, int]]) -> list[Result]:
        return [result(tokens, free_mib=free) for tokens, free in made]

    once = merge(merge({}, results(kept)), results(found))
    assert merge(once, results(found)) == once == merge(once, results(found[::-1]))


def test_a_record_without_kernels_gets_those_that_a_replica_has_chosen_since() -> None:
    """An earlier operator recorded none."""
    kept = merge({}, [result()])
    chosen = result(5000, source=Source.RECORDED, gemm_kernels=("8 64 32 1",))
    again = merge(kept, [chosen])
    assert again["f" * 32] == replace(kept["f" * 32], gemm_kernels=("8 64 32 1",))
    assert merge(again, [replace(chosen, gemm_kernels=("8 64 32 2",))]) == again


def test_a_record_is_of_one_number_of_ranks() -> None:
    """A fingerprint has the number too; one that did not would mix sizes that differ by half."""
    alone, pair = result(4096), result(2000, ranks=(MEMORY, MEMORY))
    kept = merge({}, [alone])
    assert kept["f" * 32].ranks is None and '"ranks"' not in records.text(kept, Reuse.AUTO)
    kept = merge(kept, [pair])
    assert (kept["f" * 32].kv_tokens, kept["f" * 32].ranks) == (2000, 2)
    assert merge(kept, [replace(pair, kv_tokens=1990)])["f" * 32].kv_tokens == 1990
    recorded = replace(alone, source=Source.RECORDED, gemm_kernels=("8 64 32 1",))
    assert merge(kept, [recorded]) == kept
    written = records.text(kept, Reuse.AUTO)
    assert Records.parse(written).records == kept == records.read({"data": {RECORDS_FILE: written}})


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 40), st.integers(0, 59))))
def test_at_most_sixteen_and_the_same_bytes_in_any_order(found: list[tuple[int, int, int]]) -> None:
    made = [
        result(tokens, f"{name:032x}", measured_at=f"2026-11-21T10:{minute:02}:00Z")
        for tokens, name, minute in found
    ]
    kept = merge({}, made)
    assert len(kept) <= MAX_RECORDS == 16
    assert merge(kept, []) == kept
    assert records.text(kept, Reuse.AUTO) == records.text(merge(kept, []), Reuse.AUTO)
    assert list(kept) == sorted(kept)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
    ],
)
def test_without_a_file_there_are_no_records(data: dict[str, str] | None) -> None:
    assert records.read(None if data is None else {"data": data}) == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", "not a JSON document"),
        (json.dumps({"version": 9, "reuse": "Auto", "records": {}}), "records of version 9"),
        (json.dumps({"version": 1, "reuse": "Auto", "records": {"f": {}}}), "kvTokens: missing"),
        ("[" * 70_000, "at most 65536"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, named: str) -> None:
    with pytest.raises(ContractError, match=named):
        records.read({"data": {RECORDS_FILE: text}})
