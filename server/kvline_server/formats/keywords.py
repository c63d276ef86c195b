"""Keywords of JSON schemas: which of them say what is valid, where schemas stand within a schema,
and what none of our grammars keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from kvline_server.formats.tools import pointed

# All that a value may fail; `format` may be no more than a hint, by the standard.
ASSERTIONS = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if"}
    | {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"}
    | {"minLength", "maxLength", "pattern", "minimum", "maximum", "multipleOf"}
    | {"exclusiveMinimum", "exclusiveMaximum", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$recursiveRef"}
)
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTED = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_SINGLE = {"items", "additionalProperties", "not", "if", "then", "else", "contains"}
# A whole number that is excluded, and the bound on its other side.
_EXCLUDED = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
)


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """It, and those within it; values, as of `enum` or `default`, are none."""
    left = [schema]
    while left:
        at = left.pop()
        if not isinstance(at, dict):
            continue
        yield at
        for keyword, value in at.items():
            if keyword in _BY_NAME and isinstance(value, dict):
                left += value.values()
            elif keyword in _LISTED and isinstance(value, list):
                left += value
            elif keyword in _SINGLE:
                left.append(value)


def unkept(schema: Mapping[str, Any]) -> str | None:
    """The first thing in it that llguidance takes and does not keep."""
    ended = set[str]()  # references that lead to what is none
    for at in subschemas(schema):
        if not isinstance(at.get("required", []), list):
            return f"'required' must be a list of names, got {at['required']!r:.80}"
        if not _is_type(at.get("type", "object")):
            return f"'type' must be a text or a list of texts, got {at['type']!r:.80}"
        if "$ref" in at and (circle := _circle(at, schema, ended)) is not None:
            return f"'$ref' {circle!r:.80} leads back to itself, so no value is valid"
        if (excluded := _excluded(at)) is not None:
            return excluded
    return None


def _is_type(named: Any) -> bool:
    each = named if isinstance(named, list) else [named]
    return all(isinstance(name, str) for name in each)


def _circle(at: Mapping[str, Any], root: Mapping[str, Any], ended: set[str]) -> str | None:
    """The reference, if it leads by references alone to itself."""
    passed = set[str]()
    while isinstance(reference := at.get("$ref"), str) and reference not in ended:
        if reference in passed:
            return reference
        passed.add(reference)
        found = pointed(reference, root)
        at = found if isinstance(found, dict) else {}
    ended |= passed
    return None


def _excluded(at: Mapping[str, Any]) -> str | None:
    """llguidance 1.9 allows a whole number that is excluded where the other bound is less than one
    away."""
    for keyword, others in _EXCLUDED:
        bound = _number(at[keyword]) if keyword in at else None
        if bound is None or bound.denominator != 1:
            continue
        for other in others:
            limit = _number(at.get(other))
            if limit is not None and 0 < abs(limit - bound) < 1:
                return f"{keyword!r} beside {other!r}, less than 1 apart, cannot be kept"
    return None


def _number(value: Any) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        return None
    return Fraction(value)


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)
