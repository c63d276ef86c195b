"""docs/reliability.md has a row for all of the catalogue, and no row claims more than its tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import catalogue
import pytest


def test_the_catalogue_is_whole() -> None:
    numbers = {"F": 78, "C": 26, "H": 49, "L": 19}
    listed = [f"{letter}{n:02}" for letter, last in numbers.items() for n in range(1, last + 1)]
    assert list(catalogue.rows()) == listed


def test_the_page_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| ([FCHL]\d{2}) \|", catalogue.PAGE.read_text(), re.M)
    assert rows == list(catalogue.rows())


def test_a_row_says_what_was_not_run_and_what_failed() -> None:
    row = catalogue.Row("F01", "a fault", "an end")
    assert "not tested" in row.line()
    row.tests["a.py::one"] = catalogue.Seen("ended in 3 s")
    assert row.verdict() == "not run" and "ended in 3 s" in row.line()
    row.tests["b.py::two"] = catalogue.Seen("ended too", "passed")
    assert row.verdict() == "passed (1 not run)"
    row.tests["b.py::two"].add("failed")
    row.tests["b.py::two"].add("passed")  # one parameter of many failed: it stays failed
    assert "FAILED" in row.verdict() and "b.py::two" in row.verdict()


def test_a_row_whose_test_was_late_is_unstable_or_failed_and_never_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(**files: str) -> str:
        for file, outcome in files.items():
            written = {"F01": {"a.py::one": ["it ends", outcome]}}
            (tmp_path / f"{file.replace('_', '-')}.json").write_text(json.dumps(written))
        return str(catalogue.collected(catalogue.rows())["F01"].verdict())

    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    assert "FAILED" in verdict(process="late")
    assert verdict(again_0="passed") == "unstable: a.py::one"
    assert "FAILED" in verdict(again_0="late"), "late once more"
    assert "FAILED" in verdict(again_0="passed", again_1="late"), "another parameter late again"
    (tmp_path / "again-1.json").unlink()
    assert "FAILED" in verdict(again_0="passed", unit="failed"), "another parameter failed"


def test_a_mark_says_more_than_a_docstring_and_that_more_than_a_name() -> None:
    class Item:
        originalname = "test_the_thing_holds"
        name = originalname

        def __init__(self, doc: str | None, *marks: object) -> None:
            self.obj, self.marks = type("f", (), {"__doc__": doc}), marks

        def iter_markers(self, name: str) -> tuple[object, ...]:
            return self.marks

    mark = type("Mark", (), {"args": ("F10",), "kwargs": {"shows": "for 10 s"}})
    assert catalogue.shown(Item("F10, F12: of ten calls one. More.", mark)) == {
        "F10": "for 10 s",
        "F12": "of ten calls one",
    }
    assert catalogue.shown(Item("F22-F24.")) == dict.fromkeys(
        ("F22", "F23", "F24"), "the thing holds"
    )
    assert catalogue.shown(Item(None)) == {}
