"""The choice of kernels as a file: of this key or of none, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvline_server.kernels import tuning

CHOICES = {(8192, 28672, 4096): 7, (1, 4096, 4096): -2}


def test_what_was_written_is_read_by_the_same_key_only(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    assert tuning.read(file, "a") is None
    tuning.write(file, "a", CHOICES)
    assert tuning.read(file, "a") == CHOICES
    assert tuning.read(file, "b") is None
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"key":"a","choices":[[1,2,3]]}', "[" * 5000])
def test_a_file_that_is_not_ours_counts_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text)
    assert tuning.read(file, "a") is None


def test_texts_of_a_record_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    texts = tuning.texts(CHOICES)
    assert texts == ("1 4096 4096 -2", "8192 28672 4096 7")
    assert tuning.parse(texts) == CHOICES
    for wrong in ((), ("1 2 3",), ("1 2 3 4 5",), (*texts, "1 2 3 x")):
        assert tuning.parse(wrong) is None
    file = tmp_path / "tuning.json"
    assert tuning.known(file, "a", ()) == (None, "measured now")
    assert tuning.known(file, "a", texts) == (CHOICES, "recorded by an identical replica")
    tuning.write(file, "a", {})
    assert tuning.known(file, "a", texts) == ({}, "cached by an earlier start")
