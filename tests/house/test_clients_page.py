"""docs/clients.md has a cell for each test of a client, and no other."""

from __future__ import annotations

import page
from asking import cases
from tested_clients import CLIENTS, OF_TEST, OTHERS


def test_the_table_is_what_is_tested() -> None:
    """`python tests/clients/page.py` writes it."""
    text = page.PAGE.read_text()
    assert page.whole(text) == text
    cells = sum(line.count("| yes") for line in text.splitlines())
    assert cells == len(cases(OF_TEST)) + len(cases(OTHERS)) > 0


def test_each_client_has_its_script_and_a_feature() -> None:
    folders = (page.HERE / "python", page.HERE / "node")
    scripts = {file.name for folder in folders for file in folder.iterdir()}
    assert all(each.script in scripts and each.features for each in CLIENTS)
    assert len({each.name for each in CLIENTS}) == len(CLIENTS)
