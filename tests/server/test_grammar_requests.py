"""What requests ask becomes a grammar, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_server.grammars import grammar
from kvline_server.grammars.asked import asked
from kvline_server.grammars.grammar import (
    COMPACT,
    MAX_DEPTH,
    WHITESPACE,
    Grammar,
    GrammarInvalid,
)
from kvline_server.grammars.source import source
from kvline_server.options.grammars import MAX_BYTES

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü/"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"ü/"}}}'


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "want"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, None, Grammar("json_object")),
        (schema(), None, Grammar("json_schema", TEXT)),
        (schema(strict=True, description="d"), None, Grammar("json_schema", TEXT)),
        (schema(strict=False), None, Grammar("json_schema", TEXT)),
        (schema(strict=None), None, Grammar("json_schema", TEXT)),
        (None, {"json": SCHEMA}, Grammar("json_schema", TEXT)),
        (None, {"json": json.dumps(SCHEMA), "regex": None}, Grammar("json_schema", TEXT)),
        ({"type": "text"}, {"json_object": True}, Grammar("json_object")),
        (None, {"json": SCHEMA, "json_object": False}, Grammar("json_schema", TEXT)),
        (None, {"regex": "^a{1,3}$"}, Grammar("regex", "^a{1,3}$")),
        (None, {"choice": ["yes", "ü"]}, Grammar("choice", '["yes","ü"]')),
        (None, {"grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"')),
        (
            None,
            {"json_object": True, "disable_any_whitespace": True},
            Grammar("json_object", "", COMPACT),
        ),
        (None, {"json": SCHEMA, "whitespace_pattern": " *"}, Grammar("json_schema", TEXT, " *")),
        (None, {"regex": "a", "disable_any_whitespace": False}, Grammar("regex", "a")),
    ],
)
def test_what_is_asked_is_a_grammar(
    response_format: Any, structured_outputs: Any, want: Grammar | None
) -> None:
    assert asked(response_format, structured_outputs, {}) == want


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


TAGS = {"type": "structural_tag"}
RF, SO = "response_format", "structured_outputs"


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "param", "words"),
    [
        ("json", None, RF, "expected an object"),
        ({}, None, f"{RF}.type", "expected text, json_object"),
        ({"type": "yaml"}, None, f"{RF}.type", "got 'yaml'"),
        ({"type": "json_schema"}, None, f"{RF}.json_schema", "expected an object"),
        (schema(schema=None), None, f"{RF}.json_schema.schema", "a JSON schema"),
        (schema(schema=True), None, f"{RF}.json_schema.schema", "a JSON schema"),
        (schema(strict="yes"), None, f"{RF}.json_schema.strict", "true or false"),
        (schema(name=3), None, f"{RF}.json_schema.name", "a text"),
        (schema(strcit=True), None, f"{RF}.json_schema.strcit", "not known"),
        (
            schema(schema={"x-guidance": {"lenient": True}}),
            None,
            f"{RF}.json_schema.schema.x-guidance",
            "not served",
        ),
        (schema(schema=nested(65)), None, f"{RF}.json_schema.schema", "more than 64"),
        (schema(schema={"const": "x" * MAX_BYTES}), None, f"{RF}.json_schema.schema", "262144"),
        (schema(schema={"const": "a\0"}), None, f"{RF}.json_schema.schema", "NUL"),
        (schema(schema={"const": "\ud800"}), None, f"{RF}.json_schema.schema", "surrogate"),
        (schema(schema={"maximum": float("inf")}), None, f"{RF}.json_schema.schema", "finite"),
        (schema(), {"regex": "a"}, SO, "one of the two"),
        (None, {}, SO, "got none of them"),
        (None, {"regex": "a", "choice": ["b"]}, SO, "got regex and choice"),
        (None, {"guided_json": {}}, f"{SO}.guided_json", "not known"),
        (None, {"regex": ""}, f"{SO}.regex", "not empty"),
        (None, {"regex": 3}, f"{SO}.regex", "not empty"),
        (None, {"grammar": "a\0"}, f"{SO}.grammar", "NUL"),
        (None, {"grammar": "a" * (MAX_BYTES + 1)}, f"{SO}.grammar", "262145 bytes"),
        (None, {"choice": []}, f"{SO}.choice", "1 to 16384 texts"),
        (None, {"choice": "ab"}, f"{SO}.choice", "1 to 16384 texts"),
        (None, {"choice": ["a", 3]}, f"{SO}.choice", "1 to 16384 texts"),
        (None, {"json": "{"}, f"{SO}.json", "an object or its JSON"),
        (None, {"json": "[" * 100_000}, f"{SO}.json", "in each other"),
        (None, {"json": [1]}, f"{SO}.json", "a JSON schema"),
        (None, {"json_object": "yes"}, f"{SO}.json_object", "true or false"),
        (None, {"json": {}, "disable_any_whitespace": 1}, f"{SO}.disable_any_whitespace", "true"),
        (
            None,
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            f"{SO}.whitespace_pattern",
            "one of the two",
        ),
        (None, {"json": {}, "whitespace_pattern": ""}, f"{SO}.whitespace_pattern", "a regex"),
        (None, {"regex": "a", "whitespace_pattern": " "}, f"{SO}.whitespace_pattern", "goes with"),
        (
            None,
            {"choice": ["a"], "disable_any_whitespace": True},
            f"{SO}.disable_any_whitespace",
            "goes with",
        ),
        (
            None,
            {"json": {}, "disable_additional_properties": True},
            f"{SO}.disable_additional_properties",
            "additionalProperties to false",
        ),
        (TAGS, None, f"{RF}.format", "expected an object"),
        (None, {"structural_tag": "[]"}, f"{SO}.structural_tag", "expected an object"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_its_field(
    response_format: Any, structured_outputs: Any, param: str, words: str
) -> None:
    with pytest.raises(GrammarInvalid) as error:
        asked(response_format, structured_outputs, {})
    assert error.value.param == param
    assert str(error.value).startswith(f"{param}: ") and words in str(error.value)


def test_a_schema_as_deep_as_is_taken() -> None:
    assert grammar.depth(nested(MAX_DEPTH)) == MAX_DEPTH
    assert asked(schema(schema=nested(MAX_DEPTH)), None, {}) is not None
    assert grammar.depth(nested(100_000)) == MAX_DEPTH + 1, "no recursion"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), JSON), st.booleans())
def test_a_schema_is_what_was_sent_with_its_whitespace(value: Any, compact: bool) -> None:
    if grammar.OVERRIDES in value or "\\u0000" in json.dumps(value):
        return
    given = {"json": value, **({"disable_any_whitespace": True} if compact else {})}
    made = asked(None, given, {})
    assert made is not None
    (inner,) = json.loads(source(made))["grammars"]
    options = inner["json_schema"].pop("x-guidance")
    assert inner == {"json_schema": value}
    assert list(inner["json_schema"]) == list(value), "in the order of its properties"
    assert options == (
        {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    )


def test_grammars_have_the_same_key_only_where_they_are_the_same() -> None:
    made = [
        Grammar("regex", "a"),
        Grammar("lark", "a"),
        Grammar("regex", "b"),
        Grammar("json_object"),
        Grammar("json_object", whitespace=COMPACT),
    ]
    assert len({each.key() for each in made}) == len(made)
    assert Grammar("regex", "a").key() == made[0].key()
    assert all(len(each.key()) == 16 for each in made)
