"""200 tools whose schemas are nastier from one to the next: values, each alone; what may stand
around a value; whole schemas that are no plain list of properties; values within values, up to ten
deep, drawn with a seed; and ten tools as coding agents send them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from agent_schemas import AGENT_TOOLS

from kvline_server.formats.tools import Tool

COUNT = 200
SEED = 20
DEEPEST = 10
USUALLY = 13  # the first of AROUND
USUAL_VALUES = {  # and what stands around them
    *("string", "integer", "number", "boolean", "null", "empty", "any_object", "enum", "const"),
    *("enum_of_1000", "enum_of_types", "types", "nullable", "minimum", "lengths", "pattern"),
    *("format_date", "format_uuid", "safe_integer", "described", "pair"),
}

Defs = dict[str, Any]
Around = Callable[[Any, Defs], Any]

# Names of properties, as people and programs choose them.
NAMES = (
    "value",
    "größe",
    "名前",
    "два",
    "snake_case",
    "kebab-case",
    "$odd",
    "with.dot",
    "camelCase",
)
ODD_NAMES = ("with space", 'a "quoted"', "back\\slash", "<tag>", "line\nbreak", "", "🌞", "e\u0301")

STRING: dict[str, Any] = {"type": "string"}
CLOSED: dict[str, Any] = {"additionalProperties": False}
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)

VALUES: dict[str, Any] = {
    "string": STRING,
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "empty": {},
    "true": True,
    "described": {
        "title": "T",
        "description": 'say "x"\n</parameter>',
        "examples": [1],
        "default": 2,
    },
    "any_object": {"type": "object"},
    "any_list": {"type": "array"},
    "enum": {"enum": ["a", "b"]},
    "enum_of_1000": {"type": "string", "enum": [f"value {n}" for n in range(1000)]},
    "enum_of_1000_numbers": {"type": "integer", "enum": [n * n for n in range(1000)]},
    "enum_of_types": {"enum": ["1", 1, 1.5, True, None, "null", [1], {"a": "b"}]},
    "enum_of_names": {"enum": [*NAMES, *ODD_NAMES]},
    "enum_of_another_type": {"type": "integer", "enum": ["a", "b"]},
    "enum_of_marks": {"enum": ["</parameter>", "<tool_call>", "[/INST]", "```", "<|call|>"]},
    "enum_with_length": {"type": "string", "enum": ["a", "bb", "ccc"], "minLength": 2},
    "enum_with_pattern": {"type": "string", "enum": ["a", "bb"], "pattern": "^b"},
    "enum_with_minimum": {"type": "integer", "enum": [1, 2, 3], "minimum": 2},
    "enum_of_nothing": {"enum": []},
    "enum_of_one_twice": {"enum": ["a", "a"]},
    "const": {"const": "x\n\"'\\ü"},
    "const_object": {"const": {"a": [1, {"b": None}]}},
    "const_and_enum": {"const": "a", "enum": ["b", "c"]},
    "const_true": {"type": "boolean", "const": True},
    "types": {"type": ["string", "integer", "null"]},
    "all_types": {"type": ["string", "number", "boolean", "null", "array", "object"]},
    "unknown_type": {"type": "any"},
    "type_that_is_null": {"type": None},
    "nullable": {"type": "string", "nullable": True},
    "minimum": {"type": "integer", "minimum": -7, "maximum": 1_000_000},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "exclusive_within": {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 3.5},
    "exclusive_of_draft_4": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    "safe_integer": {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    "huge": {"type": "integer", "minimum": 10**30},
    "impossible_range": {"type": "integer", "minimum": 3, "maximum": 2},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 1},
    "multiple_of_a_half": {"type": "number", "multipleOf": 0.5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "long": {"type": "string", "minLength": 1, "maxLength": 2_000},
    "impossible_length": {"type": "string", "minLength": 3, "maxLength": 2},
    "length_that_is_text": {"type": "string", "maxLength": "9"},
    "pattern": {"type": "string", "pattern": "^[a-z0-9-]{3,12}$"},
    "pattern_within": {"type": "string", "pattern": "[0-9]+/[0-9]+"},
    "pattern_of_alternatives": {"type": "string", "pattern": "^(https?|ftp)://[^ ]+$"},
    "pattern_of_letters": {"type": "string", "pattern": "^[à-ÿ가-힣]{2,8}$"},
    "pattern_of_times": {"type": "string", "pattern": "^[0-9]{2}:[0-5][0-9]$"},
    "pattern_with_length": {"type": "string", "pattern": "^a+$", "maxLength": 4},
    "pattern_ahead": {"type": "string", "pattern": "^(?=.*[0-9]).{8,}$"},
    "pattern_behind": {"type": "string", "pattern": "^(a|b)\\1$"},
    "pattern_that_is_none": {"type": "string", "pattern": "(["},
    "pattern_without_type": {"pattern": "^x+$"},
    **{f"format_{each}": {"type": "string", "format": each} for each in FORMATS},
    "unknown_format": {"type": "string", "format": "color"},
    "format_of_number": {"type": "integer", "format": "int64"},
    "encoded": {"type": "string", "contentEncoding": "base64"},
    "never": False,
    "not_anything": {"not": {}},
    "unique": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "pair": {"type": "array", "prefixItems": [STRING, {"type": "null"}], "items": False},
    "pair_of_draft_7": {"type": "array", "items": [STRING, {"type": "null"}]},
    "few_properties": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "named_by_pattern": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    "missing_reference": {"$ref": "#/$defs/missing"},
    "reference_outside": {"$ref": "https://example.com/schema.json"},
    "reference_to_itself": {"$ref": "#/properties/value"},
    "unknown_keyword": {"type": "string", "x-order": 3, "isOptional": True},
}


def properties(inner: Any, **more: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": {"value": inner, "other": {"type": "boolean"}}}
    return {**found, "required": ["value"], **CLOSED, **more}


def referred(inner: Any, defs: Defs, made: Callable[[dict[str, Any]], Any] = lambda to: to) -> Any:
    """By a definition of its own."""
    name = f"d{len(defs)}"
    defs[name] = inner
    return made({"$ref": f"#/$defs/{name}"})


def tree(inner: Any, defs: Defs) -> Any:
    """Of objects that have a value and a list of such objects."""
    name = f"d{len(defs)}"
    branches = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
    defs[name] = properties(inner, properties={"value": inner, "branches": branches})
    return {"$ref": f"#/$defs/{name}"}


def mutual(inner: Any, defs: Defs) -> Any:
    """Two that refer to each other."""
    one, two = f"d{len(defs)}", f"d{len(defs) + 1}"
    defs[one] = {"anyOf": [inner, {"$ref": f"#/$defs/{two}"}]}
    defs[two] = properties({"$ref": f"#/$defs/{one}"})
    return {"$ref": f"#/$defs/{one}"}


def by_kind(inner: Any, _: Defs) -> Any:
    """A union with a tag, as Zod and Pydantic write it."""
    tagged = [
        {**properties(each, properties={"kind": {"const": kind}, "value": each})}
        for kind, each in (("a", inner), ("b", STRING))
    ]
    for each in tagged:
        each["required"] = ["kind", "value"]
    return {"oneOf": tagged, "discriminator": {"propertyName": "kind"}}


# What may stand around a value, from what every agent sends to what few programs know.
AROUND: dict[str, Around] = {
    "object": lambda inner, _: properties(inner),
    "list": lambda inner, _: {"type": "array", "items": inner},
    "nullable": lambda inner, _: {"anyOf": [inner, {"type": "null"}]},
    "short_list": lambda inner, _: {"type": "array", "items": inner, "minItems": 1, "maxItems": 3},
    "open_object": lambda inner, _: properties(inner, additionalProperties=True),
    "map": lambda inner, _: {"type": "object", "additionalProperties": inner},
    "reference": referred,
    "alternatives": lambda inner, _: {"anyOf": [inner, STRING, {"type": "array", "items": inner}]},
    "tree": tree,
    "mutual": mutual,
    "tagged": by_kind,
    "one_of": lambda inner, _: {"oneOf": [inner, {"type": "null"}]},
    "narrowed": lambda inner, _: {"allOf": [inner], "enum": [1, "a", True]},
    "narrowed_reference": lambda inner, defs: referred(
        inner, defs, lambda to: {**to, "maxLength": 1}
    ),
    "all_of": lambda inner, _: {"allOf": [inner, {"description": "more"}]},
    "all_of_reference": lambda inner, defs: referred(inner, defs, lambda to: {"allOf": [to]}),
    "beside_reference": lambda inner, defs: referred(inner, defs, lambda to: {**to, "default": 1}),
    "tuple": lambda inner, _: {"type": "array", "prefixItems": [inner, inner], "minItems": 2},
    "by_pattern": lambda inner, _: {
        "type": "object",
        "patternProperties": {"^x-": inner},
        **CLOSED,
    },
    "unicode": lambda inner, _: {"type": "object", "properties": dict.fromkeys(NAMES, inner)},
    "conditional": lambda inner, _: {"if": {"type": "string"}, "then": inner, "else": inner},
    "not": lambda inner, _: {"allOf": [inner], "not": {"const": "x"}},
    "dependent": lambda inner, _: properties(inner, dependentRequired={"value": ["other"]}),
    "unevaluated": lambda inner, _: properties(inner, unevaluatedProperties=False),
}


# What most programs send; the rest of a draw is of all.
USUAL = {name: value for name, value in VALUES.items() if name in USUAL_VALUES}
USUAL_AROUND = dict([*AROUND.items()][:USUALLY])


def argument(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"value": inner}, "required": ["value"], **CLOSED}


def of_names(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": "integer"} for key in names}, **CLOSED}


ITSELF = {"type": "object", "properties": {"child": {"$ref": "#"}}, **CLOSED}
TWO: dict[str, Any] = {"properties": {"a": STRING}, "required": ["a"]}
WHOLE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no_properties": {"type": "object"},
    "empty_properties": {"type": "object", "properties": {}, **CLOSED},
    "no_type": {"properties": {"a": STRING}, "required": ["a"]},
    "typed_by_list": {"type": ["object", "null"], "properties": {"a": STRING}},
    "list": {"type": "array", "items": STRING},
    "a_string": STRING,
    "many": of_names(*(f"property_{n}" for n in range(120))),
    "names": of_names(*NAMES),
    **{f"odd_name_{n}": of_names(name) for n, name in enumerate(ODD_NAMES)},
    "long_name": of_names("n" * 200),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "map_beside": {**TWO, "type": "object", "additionalProperties": {"type": "integer"}},
    "union": {"type": "object", "anyOf": [TWO, {"properties": {"b": STRING}, "required": ["b"]}]},
    "all_of": {"allOf": [TWO, {"properties": {"b": STRING}}]},
    "reference": {"$ref": "#/$defs/args", "$defs": {"args": argument({"type": "integer"})}},
    "reference_beside": {
        "$ref": "#/$defs/args",
        "required": ["other"],
        "$defs": {"args": {"type": "object", "properties": {"other": STRING}}},
    },
    "escaped_reference": {
        **argument({"$ref": "#/$defs/a%20b~1c"}),
        "$defs": {"a b/c": {"type": "integer"}},
    },
    "endless": {**ITSELF, "required": ["child"]},
    "true_by_reference": {**argument({"$ref": "#/$defs/yes"}), "$defs": {"yes": {"const": True}}},
    "true_by_branch": argument({"anyOf": [{"const": True}, {"const": None}]}),
    "narrowed_by_reference": {
        **argument({"$ref": "#/$defs/d", "maxLength": 3}),
        "$defs": {"d": STRING},
    },
    "values_by_reference": {
        **argument({"$ref": "#/$defs/d", "enum": ["a"]}),
        "$defs": {"d": STRING},
    },
    "branch_beside_values": argument({"anyOf": [{"type": "string"}], "enum": ["a", 1]}),
    "both_branches": argument({"anyOf": [STRING], "oneOf": [{"const": "a"}]}),
    "definitions": {**argument({"$ref": "#/definitions/d"}), "definitions": {"d": STRING}},
    "itself": ITSELF,
    "anchor": {**argument({"$ref": "#here"}), "$defs": {"d": {"$anchor": "here", **STRING}}},
    "circle": {**argument({"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "required_unknown": {**argument(STRING), "required": ["value", "missing"]},
    "required_unknown_open": {**TWO, "type": "object", "required": ["a", "missing"]},
    "required_text": {**argument(STRING), "required": "value"},
    "required_of_draft_3": {"type": "object", "properties": {"a": {**STRING, "required": True}}},
    "at_most_one": {**of_names("a", "b", "c"), "maxProperties": 1},
    "at_least_one": {**of_names("a", "b", "c"), "minProperties": 1},
    "draft_7": {**argument(STRING), "$schema": "http://json-schema.org/draft-07/schema#"},
    "unknown_draft": {**argument(STRING), "$schema": "https://example.com/draft"},
}


def deep(levels: int) -> Any:
    found: Any = {"type": "integer"}
    for _ in range(levels):
        found = {"type": "array", "items": found, "maxItems": 1}
    return found


def wide(levels: int) -> dict[str, Any]:
    """Definitions of which each refers to the next one twice."""
    each = {f"w{n}": properties({"$ref": f"#/$defs/w{n + 1}"}) for n in range(levels)}
    for n, schema in enumerate(each.values()):
        schema["properties"]["other"] = {"$ref": f"#/$defs/w{n + 1}"}
    return {**argument({"$ref": "#/$defs/w0"}), "$defs": {**each, f"w{levels}": STRING}}


def drawn(number: int, chosen: random.Random) -> tuple[str, dict[str, Any]]:
    """Values within values, deeper from one number to the next. -> what it is, and the schema"""
    defs: Defs = {}
    levels = 2 + number * (DEEPEST - 1) // COUNT
    values, around = (VALUES, AROUND) if chosen.random() < 0.3 else (USUAL, USUAL_AROUND)
    words = [chosen.choice([*values])]
    inner = values[words[0]]
    for _ in range(levels):
        words.insert(0, chosen.choice([*around]))
        inner = around[words[0]](inner, defs)
        if chosen.random() < 0.3:
            beside = {"value": values[chosen.choice([*values])], chosen.choice(NAMES): inner}
            inner = {"type": "object", "properties": beside, **CLOSED}
        if len(str(inner)) > 2000:  # one that stands in several places, in each of them
            inner = referred(inner, defs)
    found = {**argument(inner), "properties": {chosen.choice(NAMES): inner, "flag": STRING}}
    found["required"] = [next(iter(found["properties"]))]
    return "_".join(words), {**found, **({"$defs": defs} if defs else {})}


def given() -> list[tuple[str, dict[str, Any]]]:
    """Those that are no values within values."""
    found = [(name, argument(value)) for name, value in VALUES.items()]
    for name, around in AROUND.items():
        defs: Defs = {}
        found.append((f"in_{name}", {**argument(around({"type": "integer"}, defs)), "$defs": defs}))
    found += [(f"whole_{name}", schema) for name, schema in WHOLE.items()]
    found += [("deep", argument(deep(50))), ("wide", wide(8))]
    return found


@cache
def nasty_tools() -> tuple[Tool, ...]:
    """The same ones each time."""
    chosen, found = random.Random(SEED), given()
    rest = COUNT - len(found) - len(AGENT_TOOLS)
    found += [drawn(number * COUNT // rest, chosen) for number in range(rest)]
    made = [
        Tool(f"t{n}_{name}"[:64], schema, strict=True) for n, (name, schema) in enumerate(found)
    ]
    return (*made, *AGENT_TOOLS)
