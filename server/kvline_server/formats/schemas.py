"""A tool's schema as a grammar needs it: of an object, and by parameter where a format writes one
after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvline_server.formats.reader import MAX_NAME
from kvline_server.formats.tools import Tool, ToolRefused, resolved

# What says nothing about which values are valid, or what is read here.
_TOP = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "default", "examples", "$schema", "$id", "$comment", "strict"}
)
_LABEL = re.compile(r"[\w.-]+")
_SHARED = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Mapping[str, Any]
    required: bool


def object_schema(tool: Tool) -> dict[str, Any]:
    schema = dict(tool.parameters)
    named = schema.get("type", "object")
    if named != "object" and not (isinstance(named, list) and "object" in named):
        raise ToolRefused(tool.name, f"its parameters are of type {named!r}, expected 'object'")
    return {**schema, "type": "object"}


def check_name(tool: Tool, name: str) -> str:
    """A name that formats without quotes can write."""
    if not _LABEL.fullmatch(name) or len(name) > MAX_NAME:
        reason = f"this model's format cannot write the name {name!r:.80}"
        raise ToolRefused(tool.name, reason, "name" if name == tool.name else "parameters")
    return name


def parameters(tool: Tool) -> list[Parameter]:
    """Those of its properties, in order. Raises ToolRefused where the schema says more of the
    object than which they are."""
    schema = resolved(object_schema(tool), tool.parameters)
    for keyword in schema:
        if keyword not in _TOP:
            raise ToolRefused(
                tool.name,
                f"{keyword!r} of its parameters: this model's format writes them one by one, so "
                "only 'properties' and 'required' can be kept",
            )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ToolRefused(tool.name, "'properties' must be an object, and 'required' a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise ToolRefused(tool.name, f"'required' names {name!r}, which is no property")
    return [Parameter(n, _own(tool, s), n in required) for n, s in properties.items()]


def _own(tool: Tool, schema: Any) -> dict[str, Any]:
    """A parameter's schema by itself, with what it refers to."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    shared = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
    whole = {**schema, **shared}
    found = _references(whole)
    for reference in found:
        if not str(reference).startswith(tuple(f"#/{key}/" for key in _SHARED)):
            raise ToolRefused(
                tool.name,
                f"'$ref' {reference!r:.80}: this model's format writes parameters one by one, so "
                "only '#/$defs/…' can be followed",
            )
    return whole if found else dict(schema)


def _references(schema: Any) -> list[Any]:
    found, left = [], [schema]
    while left:
        at = left.pop()
        if isinstance(at, dict):
            if "$ref" in at:
                found.append(at["$ref"])
            left += at.values()
        elif isinstance(at, list):
            left += at
    return found
