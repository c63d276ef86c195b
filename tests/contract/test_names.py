"""Names of children: stable, short enough, never two services' at once. C04, C05."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.exits import ExitCode, meaning
from kvline_contract.names import base_name, gate_name

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
object_names = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)


@given(object_names)
def test_every_object_name_gives_a_label_that_leaves_room(name: str) -> None:
    base = base_name(name)
    assert LABEL.fullmatch(base)
    assert len(base) <= 40
    assert len(gate_name(base, "abcde")) <= 63
    assert base_name(name) == base


@given(object_names, object_names)
def test_different_services_have_different_children(one: str, other: str) -> None:
    assert (base_name(one) == base_name(other)) == (one == other)


def test_a_plain_name_is_kept() -> None:
    assert base_name("chat") == "chat"
    assert base_name("a" * 40) == "a" * 40
    assert base_name("a" * 41) != "a" * 41
    assert base_name("1chat").startswith("kvl-")


def test_the_exit_table_covers_every_code_we_end_with() -> None:
    assert all(meaning(int(code)) is code for code in ExitCode)
    assert meaning(77).title == "Unexpected"
