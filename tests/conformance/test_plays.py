"""The fake keeps the contract that it checks others against, and the check finds what breaks it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from check import Seen, judge
from plays import FAILURES, ORDER, Play

from kvline_contract.report import SizingReport, State, Termination


def reports(name: str, until: float = 6) -> list[SizingReport]:
    """Every different report of a play, through the wire and back."""
    out: list[SizingReport] = []
    for tenth in range(int(until * 10)):
        made = Play(name).report("uid", "pod", "abcde", tenth / 10)
        report = SizingReport.parse(made.dumps())
        if not out or report.sequence != out[-1].sequence:
            out.append(report)
    return out


@pytest.mark.parametrize("name", ["good", "shrunk", "small", *FAILURES])
def test_every_play_keeps_the_contract(name: str) -> None:
    seen = Seen(reports(name))
    judge(seen)
    assert seen.wrong == []
    states = [r.state for r in seen.reports]
    assert states[: len(ORDER)] == list(ORDER)
    assert states[-1] is (State.FAILED if name in FAILURES else State.VALIDATED)


def test_a_failure_s_words_are_what_a_pod_leaves_behind() -> None:
    for name, code in FAILURES.items():
        left = Termination.parse(Play(name).termination().dumps())
        assert left.code == code and left.name.lower() == name


def test_the_play_is_the_service_s_name() -> None:
    assert Play.of("shrunk-17").name == "shrunk"
    assert Play.of("outofmemory-3").exit_code == 40
    assert Play.of("chat").name == "good"


def broken(change: str) -> list[SizingReport]:
    good = reports("good")
    last = good[-1]
    assert last.result is not None and last.effective is not None
    return {
        "nothing": [],
        "sequence": [replace(r, sequence=1) for r in good],
        "order": [good[3], good[0]],
        "uid": [good[0], replace(good[1], pod_uid="other")],
        "context": [
            *good[:-1],
            replace(last, effective=replace(last.effective, max_model_len=1 << 30)),
        ],
        "attempt": [*good[:-1], replace(last, attempts=())],
        "end": good[:-1],
        "history": [*good[:-1], replace(last, stages=last.stages[1:])],
    }[change]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("nothing", "never gave a report"),
        ("sequence", "sequence does not rise"),
        ("order", "Loading cannot follow Stressing"),
        ("uid", "podUID changed"),
        ("context", "maxModelLen does not fit"),
        ("attempt", "no attempt survived"),
        ("end", "it ended in Validating"),
        ("history", "a stage that had passed changed"),
    ],
)
def test_what_breaks_the_contract_is_found(change: str, expected: str) -> None:
    seen = Seen(broken(change))
    judge(seen)
    assert any(expected in text for text in seen.wrong), seen.wrong
