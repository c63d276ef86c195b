"""Random walks through grammars of tool calls: whatever a model would choose, each call is valid.

KVLINE_FUZZ is how many walks are taken over all families.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import pytest
from tool_families import ALL, FAMILIES, ids, tokens
from tool_walks import calls, check_valid, compiled, read, tokenizer, walk

from kvline_server.formats.events import Text
from kvline_server.formats.format import GEMMA3, HARMONY, HERMES
from kvline_server.formats.grammar import Choice, around, each_alone, grammar
from kvline_server.formats.tools import Tool, ToolRefused
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.source import source

WALKS = min(2000, int(os.environ.get("KVLINE_FUZZ", "39")))


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": [*required], **more}
    return Tool(name, schema, strict=True)


CLOSED: dict[str, Any] = {"additionalProperties": False}
# Schemas of rising nastiness, in which each format can write every call.
EASY = [
    tool("none", {}, **CLOSED),
    tool("anything", {}),
    tool("city", {"city": {"type": "string"}}, ["city"], **CLOSED),
    tool(
        "all_types",
        {
            "s": {"type": "string"},
            "i": {"type": "integer", "minimum": -3, "maximum": 70},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "z": {"type": "null"},
            "l": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "o": {"type": "object", "properties": {"a": {"type": "boolean"}}, **CLOSED},
        },
        ["s", "l"],
        **CLOSED,
    ),
    tool("one_of_1000", {"v": {"enum": [f"value {n}" for n in range(1000)]}}, ["v"], **CLOSED),
    tool("mixed_values", {"v": {"enum": ["a", 1, None, True, "null", "1"]}}, ["v"], **CLOSED),
    tool("constant", {"c": {"const": "x\n</tool_call>"}, "d": {"const": 3}}, ["c", "d"], **CLOSED),
    tool(
        "optional",
        {k: {"type": "boolean"} for k in "abcdefgh"},
        ["c", "f"],
        **CLOSED,
    ),
    tool(
        "nested",
        {
            "o": {
                "type": "object",
                "properties": {
                    "p": {
                        "type": "object",
                        "properties": {"q": {"type": "array", "items": {"enum": [1, "x"]}}},
                        "required": ["q"],
                        **CLOSED,
                    }
                },
                "required": ["p"],
                **CLOSED,
            }
        },
        ["o"],
        **CLOSED,
    ),
    tool(
        "alternatives",
        {
            "v": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
            "w": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
            "x": {"type": ["string", "integer"], "maxLength": 5},
        },
        ["v", "w", "x"],
        **CLOSED,
    ),
    tool(
        "referred",
        {"t": {"$ref": "#/$defs/tree"}, "u": {"$ref": "#/$defs/unit"}},
        ["t", "u"],
        **CLOSED,
        **{
            "$defs": {
                "unit": {"type": "string", "enum": ["c", "f"]},
                "tree": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "integer"},
                        "l": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                    },
                    "required": ["v"],
                    **CLOSED,
                },
            }
        },
    ),
    tool(
        "ünïcödé_名前",
        {"größe": {"type": "integer"}, "名前": {"type": "string"}},
        ["größe"],
        **CLOSED,
    ),
    tool(
        "strings",
        {
            "p": {"type": "string", "pattern": "^[a-c/]{2,4}$"},
            "q": {"type": "string", "pattern": "[0-9]"},
            "l": {"type": "string", "minLength": 2, "maxLength": 4},
        },
        ["p", "q", "l"],
        **CLOSED,
    ),
    tool("untyped", {"a": {}, "b": {"description": "any"}}, ["a"], **CLOSED),
    tool(
        "like_agents",
        {
            "path": {"type": "string", "description": "where"},
            "offset": {"type": "integer", "minimum": 0, "maximum": 2**53 - 1, "default": 0},
            "limit": {"type": "number", "exclusiveMinimum": 0},
            "mode": {"type": "string", "enum": ["read", "write"], "default": "read"},
        },
        ["path"],
        **CLOSED,
        **{"$schema": "https://json-schema.org/draft/2020-12/schema"},
    ),
]
# For formats that write all arguments as one JSON value.
HARD = [
    tool("named_oddly", {'a "b"\\': {"type": "null"}, "c>d\n": {"type": "boolean"}}, ['a "b"\\']),
    Tool(
        "union",
        {
            "type": "object",
            "anyOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ],
        },
        True,
    ),
    Tool("a_map", {"type": "object", "additionalProperties": {"type": "integer"}}, True),
    Tool("recursive", {"type": "object", "properties": {"r": {"$ref": "#"}}, **CLOSED}, True),
    tool("formats", {"d": {"type": "string", "format": "date"}}, ["d"]),
]
JSON_FAMILIES = {"Llama3JSON", "Hermes", "MistralV7", "MistralV11", "Phi4Mini", "Gemma3", "Harmony"}


def tools_of(name: str) -> list[Tool]:
    return EASY + (HARD if str(ALL[name].format.name) in JSON_FAMILIES else [])


def refusal(name: str) -> Callable[[str], str]:
    def ask(lark: str) -> str:
        given = llguidance.LLMatcher.grammar_from_lark(lark)
        return str(llguidance.LLMatcher.validate_grammar(given, tokenizer(name)))

    return ask


def test_each_call_of_a_random_walk_is_valid() -> None:
    """Required calls, of one tool or one of several: every walk that ends has one, and all that
    is written belongs to calls."""
    names, ended = list(ALL), 0
    for number in range(WALKS):
        chosen = random.Random(number)
        name = names[number % len(names)]
        offered = tools_of(name)
        some = [offered[number // len(names) % len(offered)]]
        if chosen.random() < 0.3:
            some = [*{t.name: t for t in [*some, *chosen.sample(offered, 3)]}.values()]
        parallel = chosen.random() < 0.5
        lark = grammar(ALL[name].format, some, Choice("required"), parallel, ids(name))
        walked, whole = walk(name, lark, chosen)
        events = read(name, some, walked, whole)
        found = calls(events)
        check_valid(some, found, strict=True)
        ended += whole
        if whole:
            assert found and all(complete for _, _, complete in found), (number, events)
            assert parallel or len(found) == 1
            assert not any(isinstance(event, Text) for event in events), (number, events)
    assert ended >= 0.9 * WALKS


@pytest.mark.parametrize("name", ALL)
def test_a_required_call_that_is_cut_leaves_no_text(name: str) -> None:
    """At any token: not the beginning of the next call, nor the blanks before it."""
    some = [tool("none", {}, **CLOSED), tool("one", {"a": {"type": "integer"}}, ["a"], **CLOSED)]
    lark = grammar(ALL[name].format, some, Choice("required"), True, ids(name))
    for number in range(3):
        walked, _ = walk(name, lark, random.Random(number))
        for cut in range(len(walked[:200])):
            events = read(name, some, walked[:cut], False, only_calls=True)
            assert not any(isinstance(event, Text) for event in events), walked[:cut]
            whole = [complete for *_, complete in calls(events)]
            assert all(whole[:-1]), "the last one alone is cut"


def test_free_text_may_stand_around_calls_of_strict_tools_which_are_valid() -> None:
    names, seen = list(ALL), 0
    for number in range(WALKS):
        chosen = random.Random(number)
        name = names[number % len(names)]
        offered = [t for t in tools_of(name) if t.parameters["type"] == "object"]
        some = chosen.sample(offered, 2)
        some[1] = Tool(some[1].name, some[1].parameters)
        parallel = chosen.random() < 0.5
        lark = grammar(ALL[name].format, some, Choice("auto"), parallel, ids(name))
        walked, whole = walk(name, lark, chosen)
        found = calls(read(name, some, walked, whole))
        check_valid(some, found, strict=False)
        assert all(complete for _, _, complete in found[:-1])
        seen += bool(found)
    assert seen


@pytest.mark.parametrize("name", FAMILIES)
def test_a_named_tool_is_the_one_that_is_called_and_no_text_is_an_answer(name: str) -> None:
    lark = grammar(FAMILIES[name].format, EASY, Choice("named", "constant"), True, ids(name))
    walked, whole = walk(name, lark, random.Random(0))
    found = calls(read(name, EASY, walked, whole))
    assert whole and [each[0] for each in found] == ["constant"]
    assert json.loads(found[0][1]) == {"c": "x\n</tool_call>", "d": 3}
    matcher = compiled(name, lark)
    assert not matcher.is_accepting()
    assert not matcher.consume_tokens(tokens(name).tokenizer.encode("Sorry, no.").ids)


def test_a_schema_that_llguidance_refuses_names_its_tool_and_says_why() -> None:
    odd = tool("odd", {"a": {"type": "array", "uniqueItems": True}})

    def refused(choice: Choice, *tools: Tool) -> dict[str, str]:
        each = each_alone(HERMES, tools, choice, ids("Hermes"))
        found = {tool.name: refusal("Hermes")(lark) for tool, lark in each}
        return {name: reason for name, reason in found.items() if reason}

    found = refused(Choice("required"), *EASY, odd)
    assert list(found) == ["odd"] and "uniqueItems" in found["odd"]
    assert not refused(Choice("auto"), *EASY, Tool("odd", odd.parameters))
    assert not refused(Choice("named", "city"), *EASY, odd)


NOT_OBJECT = Tool("t", {"type": "array"}, True)
REFUSED = [
    ("Hermes", NOT_OBJECT, "of type 'array', expected 'object'"),
    ("QwenXML", HARD[1], "'anyOf' of its parameters"),
    ("QwenXML", HARD[3], "'\\$ref' '#'"),
    ("QwenXML", HARD[4], "'format' of a string"),
    ("QwenXML", HARD[0], "cannot write the name 'c>d"),
    ("QwenXML", tool("t", {}, ["a"]), "'required' names 'a'"),
    ("QwenXML", tool("t", {"a": {"enum": ["</parameter>"]}}), "a value has </parameter>"),
    ("QwenXML", tool("t", {"a": {"type": "integer", "enum": ["b"]}}), "none of its values"),
    ("QwenXML", tool("t", {"a": {"type": "string", "pattern": "^a|b$"}}), "use groups"),
    (
        "QwenXML",
        tool("t", {"a": {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]}}),
        "alternatives",
    ),
    ("Pythonic", tool("a b", {}), "cannot write the name 'a b'"),
    ("Pythonic", tool("t", {"a b": {}}), "cannot write the name 'a b'"),
    ("MistralV11", tool("a b", {}), "cannot write the name 'a b'"),
    ("Harmony", tool("a b", {}), "cannot write the name 'a b'"),
]


@pytest.mark.parametrize(("name", "refused", "why"), REFUSED)
def test_what_a_format_cannot_write_is_refused_by_name(name: str, refused: Tool, why: str) -> None:
    with pytest.raises(ToolRefused, match=why) as error:
        grammar(FAMILIES[name].format, [refused], Choice("required"), True, ids(name))
    assert error.value.tool == refused.name


def test_gemma_writes_json_where_python_cannot_express_a_tool() -> None:
    lark = grammar(GEMMA3, [HARD[0]], Choice("required"), True, {})
    assert "json-calls" in lark and "python-calls" not in lark
    both = grammar(GEMMA3, [EASY[2]], Choice("required"), True, {})
    assert "json-calls" in both and "python-calls" in both


def test_harmony_without_its_tokens_is_refused() -> None:
    with pytest.raises(ToolRefused, match="no token of this model's tokenizer"):
        grammar(HARMONY, [EASY[2]], Choice("required"), True, {})


WRITTEN = {  # arguments of a call
    "json": '{"x": 1}',
    "python": "x=1, y='a'",
    "xml": "<parameter=x>\n1\n</parameter>\n<parameter=y>\na\nb\n</parameter>\n",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_that_is_not_strict_takes_any_arguments_beside_one_that_is(name: str) -> None:
    family = FAMILIES[name]
    tools = [tool("none", {}, **CLOSED), Tool("free", {"properties": {"x": {"type": "null"}}})]
    lark = grammar(family.format, tools, Choice("auto"), True, ids(name))
    text = family.write([("free", WRITTEN[family.written].replace("'", '"'))])
    if name == "Gemma3":
        text = text.removeprefix("```json\n").removesuffix("\n```")
    text = text.removesuffix("<|call|>")
    assert ends(name, compiled(name, lark), text), lark


def ends(name: str, matcher: llguidance.LLMatcher, text: str) -> bool:
    """Whether the text is a whole answer."""
    given = tokens(name).tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.consume_tokens(given) and matcher.is_accepting())


def test_harmony_s_messages_stand_around_an_answer_in_another_grammar() -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a":1}'
    call = "<|channel|>commentary to=functions.anything <|constrain|>json<|message|>{}"
    for tools in ([], [EASY[1]]):
        lark = around(HARMONY, tools, True, ids("Harmony"), "")
        form = Grammar("json_schema", json.dumps({"const": {"a": 1}}), around=lark)

        def takes(text: str, form: Grammar = form) -> bool:
            made = llguidance.LLMatcher(tokenizer("Harmony"), source(form), log_level=0)
            return ends("Harmony", made, text)

        assert takes(final) and takes(analysis + final) and takes(analysis * 2 + final)
        assert takes(analysis + call) == bool(tools)
        assert not any(map(takes, ('{"a":1}', analysis, "<|channel|>final<|message|>hm")))
