"""What the schemas of tools multiply, by references and alternatives, is bounded."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from tool_families import FAMILIES, ids
from waiting import within

from kvline_server.formats.grammar import Choice, around, grammar
from kvline_server.formats.schemas import parameters
from kvline_server.formats.tools import Tool, ToolRefused


def tool(name: str, properties: dict[str, Any], **more: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties, **more}, strict=True)


EASY = tool("easy", {"city": {"type": "string"}})
REQUIRED = Choice("required")


def ways(number: int) -> dict[str, Any]:
    """Definitions of which each has as many alternatives as there are, of the next one."""
    refers = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * number} for n in range(8)}
    return {**refers, "8": {"type": "string"}}


BOUNDED: list[tuple[str, Tool, str]] = [
    (
        "QwenXML",
        tool("t", {"a": {"$ref": "#/$defs/0"}}, **{"$defs": ways(10)}),
        "'a': more than 100 alternatives",
    ),
    (
        "QwenXML",
        tool("t", {"a": {"anyOf": [{"type": "integer"}] * 101}}),
        "'a': more than 100 alternatives",
    ),
    ("QwenXML", tool("t", {"a": {"anyOf": []}}), "'a': no string among"),
    (
        "QwenXML",
        tool(
            "t",
            {f"p{n}": {"anyOf": [{"$ref": "#/$defs/a"}] * 90 + [{}]} for n in range(20)},
            **{"$defs": {"a": {"anyOf": [{"type": "integer"}] * 99}}},
        ),
        "more than 20000 parts",
    ),
    (
        "QwenXML",
        tool("t", {"a": {"$ref": f"#/$defs/a{'/a' * 999}"}}, **{"$defs": {"a": {}}}),
        "more than 1024 characters",
    ),
]


@pytest.mark.parametrize(("name", "refused", "why"), BOUNDED)
def test_what_a_schema_s_references_multiply_is_bounded(name: str, refused: Tool, why: str) -> None:
    known = ids(name)
    with within(1), pytest.raises(ToolRefused, match=why) as error:
        grammar(FAMILIES[name].format, [EASY, refused], REQUIRED, True, known)
    assert error.value.tool == "t"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_definition_that_many_parameters_refer_to_takes_no_memory_for_each(name: str) -> None:
    shared = {"a": {"type": "string", "description": "x" * 300_000}}
    large = tool("t", {f"p{n}": {"$ref": "#/$defs/a"} for n in range(2000)}, **{"$defs": shared})
    known = ids(name)
    tracemalloc.start()
    try:
        with pytest.raises(ToolRefused, match="more than 262144 bytes"):
            grammar(FAMILIES[name].format, [EASY, large], REQUIRED, True, known)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["QwenXML", "Pythonic"])
def test_definitions_are_not_read_for_parameters_that_refer_to_none(name: str) -> None:
    shared = {f"d{n}": {"anyOf": [{"$ref": "#/$defs/d0"}] * 8} for n in range(2000)}
    large = tool("t", {f"p{n}": {"type": "integer"} for n in range(500)}, **{"$defs": shared})
    with within(1):
        lark = grammar(FAMILIES[name].format, [large], REQUIRED, True, ids(name))
    assert "$defs" not in lark


def test_definitions_that_many_parameters_refer_to_are_read_once() -> None:
    shared = {f"d{n}": {"anyOf": [{"$ref": "#/$defs/d0"}] * 8} for n in range(2000)}
    large = tool("t", {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(500)}, **{"$defs": shared})
    with within(1):
        assert len(parameters(large)) == 500


def test_a_tool_that_many_before_it_leave_no_room_is_refused_by_its_name() -> None:
    tools = [tool(f"t{n}", {"a": {"enum": ["x" * 50_000]}}) for n in range(9)]
    for name in FAMILIES:
        with pytest.raises(ToolRefused, match="with the tools before it") as error:
            grammar(FAMILIES[name].format, tools, REQUIRED, True, ids(name))
        assert error.value.tool == "t5", name
        with pytest.raises(ToolRefused, match="with the tools before it"):
            around(FAMILIES[name].format, tools, True, ids(name), "")
