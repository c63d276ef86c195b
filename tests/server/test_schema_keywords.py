"""Keywords that would be taken and not kept: refused by name, or kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_families import FAMILIES, ids, tokens
from tool_walks import compiled
from waiting import within

from kvline_server.formats.grammar import Choice, grammar, schema_reason
from kvline_server.formats.keywords import subschemas, unkept
from kvline_server.formats.tools import Tool, ToolRefused, pointed
from kvline_server.grammars.asked import asked
from kvline_server.grammars.grammar import GrammarInvalid

STRING: dict[str, Any] = {"type": "string"}
CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
UNKEPT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "string", "required": True}}}, "'required' must be a list"),
    ({"items": {"type": None}}, "'type' must be a text or a list of texts, got None"),
    ({"type": ["string", 3]}, "'type' must be"),
    (CIRCLE, "leads back to itself"),
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads back to itself"),
    ({"anyOf": [{"exclusiveMinimum": 0, "maximum": 0.5}]}, "'exclusiveMinimum' beside 'maximum'"),
    ({"exclusiveMaximum": -1.0, "minimum": -1.5}, "'exclusiveMaximum' beside 'minimum'"),
]
KEPT: list[dict[str, Any]] = [
    {"properties": {"required": True, "type": {"type": "null"}, "$ref": {"enum": ["$ref"]}}},
    {"enum": [{"required": True, "type": 3}], "default": {"$ref": "#/enum"}},
    {"properties": {"child": {"$ref": "#"}}},
    {"$ref": "#here", "$defs": {"a": {"$anchor": "here"}}},
    {"exclusiveMinimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0.5, "maximum": 0.75},
    {"exclusiveMinimum": True, "minimum": 3},
    {"exclusiveMinimum": 10**400, "maximum": 1e300},
    {"exclusiveMinimum": float("inf"), "maximum": float("nan")},
]


@pytest.mark.parametrize(("schema", "words"), UNKEPT)
def test_what_is_not_kept_is_named(schema: dict[str, Any], words: str) -> None:
    assert words in str(unkept(schema))
    with pytest.raises(GrammarInvalid, match=r"structured_outputs\.json"):
        asked(None, {"json": schema}, {})
    for name, family in FAMILIES.items():
        given = Tool("t", {"properties": {"v": STRING}, "$defs": {"inner": schema}}, strict=True)
        if "$ref" in json.dumps(schema):  # from the whole schema
            given = Tool("t", schema, strict=True)
        with pytest.raises(ToolRefused) as error:
            grammar(family.format, [given], Choice("required"), True, ids(name))
        assert error.value.tool == "t"


@pytest.mark.parametrize("schema", KEPT)
def test_what_has_the_same_words_is_not(schema: dict[str, Any]) -> None:
    assert unkept(schema) is None


def test_many_references_are_followed_once() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}
    with within(1):
        assert unkept({"$defs": {**chain, "d3000": {"type": "null"}}}) is None


def test_schemas_within_a_schema_are_found_and_values_are_none() -> None:
    schema = {
        "properties": {"items": {"items": [{"const": 1}, True]}},
        "additionalProperties": {"anyOf": [{"const": 2}]},
        "enum": [{"const": 3}],
        "$defs": {"a": {"not": {"const": 4}}},
    }
    assert {each["const"] for each in subschemas(schema) if "const" in each} == {1, 2, 4}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", True),
        ("#/$defs/a%20b~1c", {"const": 1}),
        ("#/anyOf/1", {"const": 2}),
        ("#/anyOf/2", None),
        ("#/anyOf/x", None),
        ("#here", None),
        ("other#/anyOf/1", None),
    ],
)
def test_a_reference_points_to_what_it_names(reference: str, found: Any) -> None:
    root = {"$defs": {"a b/c": {"const": 1}}, "anyOf": [{}, {"const": 2}]}
    assert pointed(reference, root) == (root if found is True else found)


def argument(schema: dict[str, Any], **more: Any) -> Tool:
    return Tool("t", {"properties": {"v": schema}, "required": ["v"], **more}, strict=True)


DEFS = {"s": STRING, "yes": {"const": True}}
REFUSED = [
    ("QwenXML", argument({"$ref": "#/$defs/s", "maxLength": 3}), "'maxLength' beside '$ref'"),
    ("QwenXML", argument({"$ref": "#/$defs/s", "enum": ["a"]}), "'enum' beside '$ref'"),
    ("QwenXML", argument({"$ref": "#/$defs/none"}), "'$ref' '#/$defs/none' leads nowhere"),
    ("QwenXML", argument({"enum": ["a"], "pattern": "b"}), "'pattern' beside its values"),
    ("QwenXML", argument({"enum": ["a"], "const": "b"}), "'const' beside its values"),
    ("QwenXML", argument({"enum": ["a"], "maxLength": 0}), "none of its values"),
    ("QwenXML", argument({"anyOf": [STRING], "oneOf": [STRING]}), "these alternatives"),
    ("QwenXML", argument({"type": "string", "minLength": 3, "maxLength": 2}), "'minLength' 3"),
    ("Pythonic", argument({"$ref": "#/$defs/none"}), "'$ref' '#/$defs/none' leads nowhere"),
]


@pytest.mark.parametrize(("name", "tool", "words"), REFUSED)
def test_what_would_be_left_out_is_refused(name: str, tool: Tool, words: str) -> None:
    given = Tool("t", {**tool.parameters, "$defs": DEFS}, strict=True)
    with pytest.raises(ToolRefused) as error:
        grammar(FAMILIES[name].format, [given], Choice("required"), True, ids(name))
    assert words in error.value.reason


@pytest.mark.parametrize(
    ("name", "schema", "taken", "not_taken"),
    [
        ("Pythonic", {"$ref": "#/$defs/yes"}, "[t(v=true)]", "[t(v=False)]"),
        ("Pythonic", {"anyOf": [{"const": True}]}, "[t(v=true)]", "[t(v=False)]"),
        ("Pythonic", {"type": "boolean"}, "[t(v=False)]", "[t(v=None)]"),
        ("QwenXML", {"enum": ["a", "bb"], "minLength": 2}, "bb", "a"),
    ],
)
def test_only_what_is_valid_is_taken(
    name: str, schema: dict[str, Any], taken: str, not_taken: str
) -> None:
    family, given = FAMILIES[name], argument(schema, **{"$defs": DEFS})
    lark = grammar(family.format, [given], Choice("required"), True, ids(name))
    for text, wanted in ((taken, True), (not_taken, False)):
        if family.written == "xml":
            text = family.write([("t", f"<parameter=v>\n{text}\n</parameter>\n")])
        encoded = tokens(name).tokenizer.encode(text, add_special_tokens=False).ids
        matcher = compiled(name, lark)
        whole = matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()
        assert whole == wanted, text


def test_a_reason_has_no_lines_of_a_grammar() -> None:
    lines = '\n   1 | %llguidance {"no_forcing": true}\n   2 | start:  BLANKS'
    reason = f"at 3(19): failed to compile JSON schema: Unimplemented keys: ['not']{lines}"
    assert schema_reason(reason) == "Unimplemented keys: ['not']"
    several = "regex parse error:\n    (a\n    ^\nerror: unclosed group"
    assert schema_reason(f"at 3(29): {several}{lines}") == several
    assert schema_reason("a mask of it takes 60 ms") == "a mask of it takes 60 ms"
