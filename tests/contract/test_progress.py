"""What a start does, in words: for logs and the page with seconds, for the condition without."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.progress import headline, line, ready_at
from kvline_contract.report import Current, SizingReport, Stage, State

BEGAN = datetime(2026, 11, 26, 12, 3, 10, tzinfo=UTC)
SINCE = "2026-11-26T12:03:10Z"
WHAT = "measures the largest steps beside a small KV cache"
STRESS = Current(3, 4, WHAT, SINCE, 2, 6, "decode", "2026-11-26T12:04:00Z")
REPORT = SizingReport("u", "p", "r", 1, State.STRESSING, SINCE, SINCE, current=STRESS)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def test_the_headline_has_stage_and_since_and_changes_with_the_stage_alone() -> None:
    assert headline(STRESS) == f"stage 3 of 4: {WHAT}, since {SINCE}"
    assert headline(replace(STRESS, step=5, name="mixed", ready_at=None)) == headline(STRESS)


def test_a_line_has_step_seconds_and_rest() -> None:
    text = line(REPORT, at(20))
    assert text == f"stage 3 of 4: {WHAT}, step 2 of 6 (decode), 20 s so far, about 30 s left"
    assert line(REPORT, at(62)).endswith("62 s so far, expected to be ready 12 s ago")
    unknown = replace(REPORT, current=replace(STRESS, ready_at=None))
    assert line(unknown, at(1)).endswith("1 s so far, the rest is not known yet")
    assert line(replace(REPORT, current=None), at(1)) == ""
    warm = replace(STRESS, step=None, steps=None, name="graphs")
    assert ", graphs, " in line(replace(REPORT, current=warm), at(1))
    assert ready_at(BEGAN, 50.4) == STRESS.ready_at


def test_a_load_s_rest_is_by_its_rate() -> None:
    loads = replace(REPORT, current=Current(1, 4, "loads the model", SINCE))
    load = Stage("load", 20_000, 5 << 30, total_bytes=20 << 30)
    text = line(replace(loads, stages=(load,)), at(25))
    assert text == (
        "stage 1 of 4: loads the model, 5,120 of 20,480 MiB, 25 s so far, "
        "about 60 s left of this stage"
    )
    begins = replace(load, bytes=0)
    assert "the rest is not known yet" in line(replace(loads, stages=(begins,)), at(1))


def test_clocks_that_differ_do_no_harm() -> None:
    assert "0 s so far" in line(REPORT, at(-30))
    strange = replace(STRESS, since="?", ready_at="soon")
    assert "so far" not in line(replace(REPORT, current=strange), at(1))


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_start_does_is_optional_in_both_versions(version: int) -> None:
    """A newer server's report is read by an operator without the field, as any unknown one, and an
    older server's by this one."""
    text = REPORT.dumps(version)
    assert SizingReport.parse(text) == REPORT
    newer = json.loads(text)
    newer["later"] = newer["current"]
    assert SizingReport.parse(json.dumps(newer)) == REPORT
    del newer["current"]
    older = SizingReport.parse(json.dumps(newer))
    assert older == replace(REPORT, current=None)
    assert "current" not in json.loads(older.dumps(version))


@given(
    st.builds(
        Current,
        st.integers(1, 32),
        st.integers(1, 32),
        st.text(max_size=128),
        st.text(max_size=32) | st.just(SINCE),
        st.none() | st.integers(1, 2**53 - 1),
        st.none() | st.integers(1, 2**53 - 1),
        st.none() | st.text(max_size=64),
        st.none() | st.text(max_size=32) | st.just(SINCE),
    ),
    st.lists(
        st.builds(
            Stage,
            st.text(max_size=64),
            st.integers(0, 2**53 - 1),
            st.integers(-(2**53), 2**53 - 1),
            st.none(),
            st.none() | st.integers(0, 2**53 - 1),
        ),
        max_size=3,
    ),
)
def test_whatever_a_pod_reports_has_a_line(current: Current, stages: list[Stage]) -> None:
    report = replace(REPORT, current=current, stages=tuple(stages))
    assert SizingReport.parse(report.dumps()) == report
    assert line(report, at(5)).startswith(f"stage {current.stage} of {current.stages}: ")
    assert headline(current)
