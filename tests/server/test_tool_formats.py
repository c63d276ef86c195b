"""Which format a chat template has, and how values that have no type of their own get one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvline_contract.launch import ToolCallParser
from kvline_server.formats.detect import NoFormat, detect, detect_thinking, in_reasoning
from kvline_server.formats.format import BRACKETS, FORMATS, THINK
from kvline_server.formats.grammar import Choice, grammar
from kvline_server.formats.json_text import Json
from kvline_server.formats.python_text import PythonValue
from kvline_server.formats.tools import TYPES, Tool, ToolRefused, types
from kvline_server.formats.typed import Kind, json_type, kind, typed

TAKES = "{% if tools %}{{ tools | tojson }}{% endif %}"
# What templates of each family write, in few words of our own.
TEMPLATES = [
    (
        ToolCallParser.LLAMA3_JSON,
        '<|start_header_id|>{{ \'{"name": "\' + n + \'", "parameters": \' }}',
    ),
    (
        ToolCallParser.LLAMA3_JSON,
        'Call it in the format {"name": which, "parameters": its arguments}.',
    ),
    (
        ToolCallParser.PYTHONIC,
        "Call as [func_name1(params_name1=params_value1, ...), func_name2()]",
    ),
    (ToolCallParser.PYTHONIC, "{{ '[f(x=1)]' }} is a call"),
    (ToolCallParser.HERMES, '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    (ToolCallParser.QWEN_XML, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>"),
    (ToolCallParser.MISTRAL_V7, "{{ '[TOOL_CALLS] [' }}"),
    (ToolCallParser.MISTRAL_V11, "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"),
    (ToolCallParser.PHI4_MINI, "{{ 'functools[' }}"),
    (ToolCallParser.GEMMA3, '<start_of_turn>model Call as {"name": it, "parameters": them}'),
    (
        ToolCallParser.GEMMA3,
        "<start_of_turn>model Call as [func_name1(params_name1=params_value1)]",
    ),
    (ToolCallParser.HARMONY, "<|channel|>commentary to=functions.f<|message|>"),
]


@pytest.mark.parametrize(("name", "text"), TEMPLATES)
def test_a_format_is_known_by_what_its_template_writes(name: ToolCallParser, text: str) -> None:
    assert detect(TAKES + text, ()) is FORMATS[name]


def test_tokens_tell_where_a_template_names_no_mark() -> None:
    template = "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    assert (
        detect(template, {"<|tool_call|>", "<|/tool_call|>"}) is FORMATS[ToolCallParser.PHI4_MINI]
    )
    assert detect(template, ()) is NoFormat.UNKNOWN
    assert detect(TAKES + "<|tool_call|>{}<|/tool_call|>", ()) is FORMATS[ToolCallParser.PHI4_MINI]


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "no tools here", "{# tools #}{{ messages }}", "{{ my_tools }}"],
)
def test_a_template_that_reads_no_tools_takes_none(template: str) -> None:
    assert detect(template, ()) is NoFormat.TAKES_NONE
    assert detect(f"{template}<tool_call>arguments", ()) is NoFormat.TAKES_NONE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<tool_call>{{ n }}<arg_key>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<start_function_call>",
        '{"name": "{{ t.name }}", "parameters": {{ t.parameters }}}',
        "<tool_call>",
    ],
)
def test_a_format_that_nobody_here_knows_is_none(text: str) -> None:
    assert detect(TAKES + text, ()) is NoFormat.UNKNOWN


def test_formats_have_names() -> None:
    assert set(FORMATS) == set(ToolCallParser) and len(FORMATS) == 9


def test_reasoning_is_known_by_its_marks() -> None:
    assert detect_thinking("{{ m.split('</think>') }}", ()) is THINK
    assert detect_thinking("", {"<think>", "</think>"}) is THINK
    assert detect_thinking("", {"[THINK]", "[/THINK]"}) is BRACKETS
    assert detect_thinking("{{ messages }}", {"<think>"}) is None


@pytest.mark.parametrize(
    ("prompt", "continued", "begins"),
    [
        ("user: hi\nassistant: ", "", False),
        ("user: hi\nassistant: <think>\n", "", True),
        ("user: <think>\nassistant: ", "", False),
        ("assistant: <think>a", "<think>a", True),
        ("assistant: <think>a</think>b", "<think>a</think>b", False),
    ],
)
def test_an_answer_may_begin_within_reasoning(prompt: str, continued: str, begins: bool) -> None:
    assert in_reasoning(THINK, prompt, continued) is begins
    assert in_reasoning(None, prompt, continued) is False


ROOT = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"$ref": "#/$defs/n"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, TYPES),
        ({"$ref": "https://example.com"}, TYPES),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"allOf": [{"type": ["integer", "null"]}, {"type": "integer"}]}, {"integer"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"items": {}}, {"array"}),
        ({}, TYPES),
        (True, TYPES),
        ({"type": 3}, TYPES),
    ],
)
def test_a_schema_says_which_types_a_value_may_have(schema: Any, expected: set[str]) -> None:
    assert types(schema, ROOT) == expected


def test_an_endless_schema_has_an_end() -> None:
    schema: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert types(schema, schema) == TYPES


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("10", {"type": "integer"}, "10"),
        ("10", {"type": "string"}, '"10"'),
        ("10", {}, '"10"'),
        (" 1e3\n", {"type": "integer"}, "1e3"),
        ("ten", {"type": "integer"}, '"ten"'),
        ("007", {"type": "integer"}, '"007"'),
        ("true", {"type": "boolean"}, "true"),
        ("True", {"type": "boolean"}, "true"),
        ("true", {"type": "string"}, '"true"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        ("null", {}, '"null"'),
        ("None", {"type": "null"}, "null"),
        ("5", {"type": ["string", "integer"]}, '"5"'),
        ("1", {"enum": [1, "a"]}, "1"),
        ("1", {"enum": ["1", 1]}, '"1"'),
        ('{"b": 1, "a" :2}', {"type": "object"}, '{"b": 1, "a" :2}'),
        ("{'a': True}", {"type": "object"}, '{"a": true}'),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("[[1]]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, "[[1]]"),
        ('a"\\\n', {"type": "integer"}, '"a\\"\\\\\\n"'),
        ("[" * 9999, {"type": "array"}, f'"{"[" * 9999}"'),
        ("9" * 9999, {"type": "integer"}, "9" * 9999),
    ],
)
def test_a_value_gets_the_type_that_its_schema_declares(
    text: str, schema: Any, expected: str
) -> None:
    assert typed(text, schema, schema) == expected


KEYWORDS = (
    *(
        "type",
        "properties",
        "required",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "$ref",
        "$defs",
    ),
    *("minLength", "maxLength", "pattern", "items", "additionalProperties", "a"),
)
SCHEMAS = st.recursive(
    st.none()
    | st.integers(-1, 9)
    | st.sampled_from(("string", "object", "#", "#/$defs/a", "^a|b$")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(KEYWORDS), SCHEMAS, max_size=4),
    st.sampled_from(list(ToolCallParser)),
)
def test_no_schema_ends_in_anything_but_a_refusal_by_name(
    schema: dict[str, Any], name: ToolCallParser
) -> None:
    for inner in (schema, *schema.values()):
        assert json.loads(typed("1", inner, schema)) in (1, "1") and kind(inner, schema)
    offered = Tool("t", {"type": "object", "properties": {"a": schema}, "$defs": schema}, True)
    known = {"<|channel|>": 1, "<|message|>": 2, "<|constrain|>": 3, "<|start|>": 4, "<|end|>": 5}
    for each in (offered, Tool("t", schema, True)):
        try:
            assert grammar(FORMATS[name], [each], Choice("required"), True, known)
        except ToolRefused as refused:
            assert refused.tool == "t" and refused.reason


def test_only_a_value_that_is_surely_a_string_is_shown_before_it_ends() -> None:
    assert kind({"type": "string"}, {}) is kind({}, {}) is Kind.STRING
    assert kind({"type": ["string", "null"]}, {}) is Kind.STRING_OR_NULL
    assert kind({"enum": ["a"]}, {}) is kind({"type": "integer"}, {}) is Kind.WHOLE


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES, st.booleans(), st.integers(0, 2**32))
def test_a_json_value_ends_where_it_ends_however_it_is_cut(
    value: Any, ascii: bool, seed: int
) -> None:
    text, chosen = json.dumps(value, ensure_ascii=ascii), random.Random(seed)
    scan, at = Json(), 0
    while at < len(text):
        end = min(len(text), at + chosen.choice((1, 2, 7)))
        assert scan.feed(text[at:end]) == end - at and not scan.broken
        shown = text[: end - scan.partial]
        if scan.partial and scan.in_string:
            assert not shown.endswith("\\") or shown.endswith("\\\\")
        at = end
    rest = scan.feed(" ,")
    scan.end()
    assert scan.done and not scan.broken and rest <= 1


@given(st.text('{}[]",:\\u0123456789abcdeftrnls+-. \n', max_size=12))
@example("1d")
@example("-d")
def test_json_is_what_the_standard_library_takes(text: str) -> None:
    try:
        json.loads(text, parse_constant=lambda word: 1 / 0)
        valid = True
    except (ValueError, ZeroDivisionError):
        valid = False
    assert (json_type(text.strip(" \n\t\r")) is not None) == valid


@given(JSON_VALUES, st.integers(0, 2**32))
def test_a_python_literal_becomes_the_same_value_however_it_is_cut(value: Any, seed: int) -> None:
    text, chosen = f"{value!r})", random.Random(seed)
    scan, at, out = PythonValue(), 0, ""
    while at < len(text) and not scan.done:
        end = min(len(text), at + chosen.choice((1, 2, 7)))
        scan.feed(text[at:end])
        out += scan.take()
        at = end
    assert scan.done and not scan.broken and json.loads(out) == value


@pytest.mark.parametrize(
    "text",
    ["(1,)", "{1}", "{'a'}", "nan", "foo", "0x1f", "01", "[1 2]", "{'a' 1}", ".", "'\\U00110000'"],
)
def test_what_is_no_literal_is_none(text: str) -> None:
    scan = PythonValue()
    scan.feed(f"{text})")
    scan.end()
    assert scan.broken or not scan.done
