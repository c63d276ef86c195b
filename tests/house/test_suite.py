"""The test run itself: what it tries again, what it never does, and what makes it red."""

from __future__ import annotations

import importlib
import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
import results
import speed
import stages
import unstable
import waiting

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = f"""
import runpy
kept = runpy.run_path({str(ROOT / "tests" / "conftest.py")!r})
pytest_configure = kept["pytest_configure"]
pytest_collection_modifyitems = kept["pytest_collection_modifyitems"]
"""
TESTS = """
import time
from pathlib import Path
import httpx, pytest
from waiting import NotInTime, eventually, within

MARK = Path(__file__).with_name("mark")

@pytest.fixture
def ends_badly():
    yield
    assert "Traceback" not in "Traceback"

@pytest.fixture(scope="module")
def slow():
    time.sleep(0.1)

def test_good(slow):
    eventually(lambda: MARK.touch() or True, on="pod")

def test_late():
    eventually(lambda: None, 0.01)

def test_late_once():
    with within(0.05):
        time.sleep(0 if MARK.with_name("again").exists() else 0.1)

@pytest.mark.timeout(0.3)
def test_hangs():
    time.sleep(5)

@pytest.mark.timeout(0.5)
def test_hangs_while_nobody_listens():
    try:
        httpx.get("http://127.0.0.1:1")
    except httpx.ConnectError:
        time.sleep(5)

def test_a_client_s_timeout():
    raise ExceptionGroup("all", [httpx.ConnectTimeout("late"), TimeoutError()])

def test_wrong():
    assert 1 == 2

def test_one_of_two_is_wrong():
    raise ExceptionGroup("all", [TimeoutError(), ValueError("wrong")])

def test_late_and_then_a_traceback(ends_badly):
    eventually(lambda: None, 0.01)

def test_wrong_and_then_late():
    try:
        assert 1 == 2
    finally:
        eventually(lambda: None, 0.01)

def test_wrong_and_then_a_client_s_timeout():
    try:
        assert 1 == 2
    finally:
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise httpx.ConnectTimeout("late") from error

def test_wrong_and_then_late_with_another_text():
    try:
        assert 1 == 2
    except AssertionError:
        raise NotInTime("late") from None

def test_a_lost_request():
    raise httpx.ReadTimeout("never answered")

def test_out_of_tests(): pytest.skip("no")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a suite whose results stay there."""
    monkeypatch.setenv("KVLINE_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "FOLDER", tmp_path / "cache" / "test-run")
    monkeypatch.setattr(speed, "slowness", lambda: 1.0)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 120\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def stage(*more: str) -> stages.Stage:
    return stages.Stage("tried", more)


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_only_what_failed_by_a_limit_alone_is_late(folder: Path, workers: tuple[str, ...]) -> None:
    ran = stages.run(stage(*workers))
    found = {name.partition("::test_")[2]: test for name, test in ran.tests.items()}
    assert {name: test.outcome for name, test in found.items()} == {
        "good": "passed",
        "late": "late",
        "late_once": "late",
        "hangs": "late",
        "hangs_while_nobody_listens": "late",
        "a_client_s_timeout": "late",
        "wrong": "failed",
        "one_of_two_is_wrong": "failed",
        "late_and_then_a_traceback": "failed",
        "wrong_and_then_late": "failed",
        "wrong_and_then_a_client_s_timeout": "failed",
        "wrong_and_then_late_with_another_text": "failed",
        "a_lost_request": "failed",
        "out_of_tests": "skipped",
    }
    assert "NotInTime" in found["late"].output and "1 == 2" in found["wrong"].output
    assert found["good"].fixtures["slow"] >= 0.1 and found["late_once"].waited["sleep"] >= 0.1
    assert ran.cpu_seconds > 0 and ran.code == 1 and not ran.broken()


def test_a_late_test_that_passes_alone_is_unstable_and_one_that_does_not_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite: Any = importlib.import_module("suite.__main__")
    made = stage("-k", "good or (late and not traceback and not wrong)")
    monkeypatch.setitem(suite.STAGES, "tried", made)
    run = suite.Run(["tried"], stages=[stages.run(made)])
    (folder / "again").touch()
    suite.try_again(run)
    assert [name.partition("::")[2] for name in run.unstable] == ["test_late_once"]
    assert [name.partition("::")[2] for name in run.late] == ["test_late"]
    assert (run.passed, run.failed, run.last_line()[:16]) == (1, 1, "1 passed, 1 fail")
    monkeypatch.setattr(suite.summary, "FILE", folder / "test-run.json")
    assert suite.close(run) == 1
    output = capsys.readouterr().out
    assert (
        "-- and the second time:\n" in output
        and "UNSTABLE" in output
        and "took 0.1 s" in output
        and output.endswith("0 skipped\n")
        and re.search(r"FAILED .*::test_late\n  E .*NotInTime", output)
    )
    kept: dict[str, Any] = json.loads((folder / "test-run.json").read_text())
    assert [name.partition("::")[2] for name in kept["unstable"]] == ["test_late_once"]
    assert [name.partition("::")[2] for name in kept["failures"]] == ["test_late"]
    assert kept["stages"]["tried"]["late"] == 2 and set(kept) >= {"commit", "dirty", "seconds"}


def test_a_file_that_cannot_be_collected_is_red_beside_late_tests(folder: Path) -> None:
    (folder / "test_other.py").write_text("import nothing_of_that_name\n")
    ran = stages.run(stage("-n", "2", "-k", "late_once"))
    assert ran.tests["test_other.py"].outcome == "failed"
    for code, outcome, why in ((1, "late", ""), (2, "late", "code 2"), (-9, "failed", "code -9")):
        found = stages.Ran("tried", code=code, tests={"t": results.Test(outcome)})
        assert why in found.broken() and bool(why) == bool(found.broken())


TABLE = "# Unstable\n\n| test | what it waits for | since |\n|---|---|---|\n"
TODAY = date(2026, 11, 26)


def test_more_than_two_unstable_tests_or_one_listed_for_long_are_red() -> None:
    text = TABLE + "| `a.py::one` | a pod | 2026-11-12 |\n| `b.py::two` | a pod | 2026-11-11 |\n"
    known = unstable.listed(text)
    assert [row.test for row in known] == ["a.py::one", "b.py::two"]
    (why,) = unstable.faults(["a.py::one", "c.py::x"], known, TODAY)
    assert "b.py::two" in why and "15 days" in why
    assert len(unstable.faults(["x", "y", "z"], known[:1], TODAY)) == 1
    assert unstable.unlisted(["a.py::one[gpu]", "c.py::x"], known) == ["c.py::x"]


def test_a_row_that_cannot_be_read_is_an_error() -> None:
    assert unstable.listed(TABLE) == []
    with pytest.raises(ValueError, match=r"docs/unstable\.md"):
        unstable.listed(TABLE + "| a.py::one | a pod | yesterday |\n")


def collected(marker: str) -> list[Path]:
    """Files and folders in which the tests of a marker are run; `gpu` is no stage."""
    if marker == "gpu":
        return [ROOT / "tests/gpu"]
    (of,) = [made.options for made in stages.STAGES.values() if marker in made.options]
    return [ROOT / word for word in of if (ROOT / word).exists()] or [ROOT / "tests"]


@pytest.mark.parametrize("marker", stages.OTHERS.split(" or "))
def test_every_test_of_a_marker_is_where_its_stage_collects(marker: str) -> None:
    """Elsewhere no stage would run it: its own does not find it, and `unit` leaves it out."""
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(rf"\bmark\.{marker}\b", path.read_text())
    ]
    where = collected(marker)
    assert marked and not [p for p in marked if not any(p.is_relative_to(at) for at in where)]


def test_the_list_of_unstable_tests_names_tests_that_are_there_since_a_day_that_was() -> None:
    for row in unstable.listed(unstable.PAGE.read_text()):
        path, _, name = row.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), row.test
        assert row.since <= datetime.now(UTC).date(), row.test


def test_limits_grow_with_the_slowness_that_a_stage_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [speed.factor(n * speed.USUAL_SECONDS) for n in (0.5, 1.5, 100)] == [
        1.0,
        1.5,
        speed.MOST,
    ]
    monkeypatch.setenv(waiting.SLOWNESS, "2.5")
    assert waiting.limit(4) == 10
