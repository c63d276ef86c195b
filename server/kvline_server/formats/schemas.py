"""A tool's schema as a grammar needs it: of an object, and by parameter where a format writes one
after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvline_server.formats.keywords import ASSERTIONS, unkept
from kvline_server.formats.reader import MAX_NAME
from kvline_server.formats.tools import (
    MAX_REFERENCE,
    MOST_SCHEMAS,
    Tool,
    ToolRefused,
    pointed,
    resolved,
)

# What says nothing about which values are valid, or what is read here.
_TOP = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    | {"title", "description", "default", "examples", "$schema", "$id", "$comment", "strict"}
)
_LABEL = re.compile(r"[\w.-]+")
_SHARED = ("$defs", "definitions")
_FOLLOWED = tuple(f"#/{key}/" for key in _SHARED)


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
    if (reason := unkept(schema)) is not None:
        raise ToolRefused(tool.name, reason)
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
    own = object_schema(tool)
    check_alone(tool, {name: own[name] for name in own if name != "type"}, tool.parameters)
    schema = resolved(own, tool.parameters)
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
    schemas = {name: _object(schema) for name, schema in properties.items()}
    referring = {name for name, schema in schemas.items() if _refers(tool, schema)}
    shared = {key: tool.parameters[key] for key in _SHARED if key in tool.parameters}
    if referring:
        _refers(tool, shared)
    return [
        Parameter(n, {**schema, **shared} if n in referring else schema, n in required)
        for n, schema in schemas.items()
    ]


def check_alone(tool: Tool, schema: Any, root: Mapping[str, Any], key: str = "") -> None:
    """Raises ToolRefused where a `$ref` that is followed here has keywords beside it, which would
    be left out."""
    for _ in range(MOST_SCHEMAS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return
        if beside := ASSERTIONS & schema.keys():
            reason = f"{min(beside)!r} beside '$ref' cannot be kept in this model's format"
            raise ToolRefused(tool.name, f"{key!r}: {reason}" if key else reason)
        schema = pointed(schema["$ref"], root)


def _object(schema: Any) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    return {} if schema is True else {"not": {}}


def _refers(tool: Tool, schema: Any) -> bool:
    """Whether it refers to another. Raises ToolRefused where that cannot be followed."""
    found = _references(schema)
    for reference in found:
        if not str(reference).startswith(_FOLLOWED):
            raise ToolRefused(
                tool.name,
                f"'$ref' {reference!r:.80}: this model's format writes parameters one by one, so "
                "only '#/$defs/…' can be followed",
            )
        if len(reference) > MAX_REFERENCE:
            reason = f"'$ref' {reference!r:.80}: more than {MAX_REFERENCE} characters"
            raise ToolRefused(tool.name, reason)
        if pointed(reference, tool.parameters) is None:
            raise ToolRefused(tool.name, f"'$ref' {reference!r:.80} leads nowhere")
    return bool(found)


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
