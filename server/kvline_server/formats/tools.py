"""A tool that a request offers to the model, and the JSON types that its schema declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MOST_SCHEMAS = 100  # that are followed for one value's types: a schema may be endless
MAX_REFERENCE = 1024  # characters of a $ref
# Keywords that only values of one type have, where no type is named.
HINTS = {
    "properties": "object",
    "additionalProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "format": "string",
    "minimum": "number",
    "maximum": "number",
    "multipleOf": "number",
}


class ToolRefused(Exception):
    """The arguments of a tool cannot be guaranteed; the reason is a grammar's own, or names what
    the model's format cannot express. `field`: what of the tool is wrong."""

    def __init__(
        self, tool: str, reason: str, field: Literal["name", "parameters"] = "parameters"
    ) -> None:
        super().__init__(f"the arguments of {tool!r} cannot be guaranteed: {reason}")
        self.tool = tool
        self.reason = reason
        self.field: Literal["name", "parameters"] = field


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # the JSON schema of its arguments
    strict: bool = False

    def properties(self) -> Mapping[str, Any]:
        found = resolved(self.parameters, self.parameters).get("properties")
        return found if isinstance(found, dict) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a chain of local `$ref`s leads to; an empty schema where it leads nowhere."""
    for _ in range(MOST_SCHEMAS):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        schema = pointed(schema["$ref"], root)
    return {}


def pointed(reference: Any, root: Mapping[str, Any]) -> Any:
    """What `#/a/b` points to; None where that is nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    if len(reference) > MAX_REFERENCE:  # splitting it takes its time for each that leads here
        return None
    at: Any = root
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(at, list):
            at = at[int(name)] if name.isdecimal() and int(name) < len(at) else None
        else:
            at = at.get(name) if isinstance(at, dict) else None
    return at


def types(schema: Any, root: Mapping[str, Any], most: int = MOST_SCHEMAS) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say, or not by
    its first `most` parts."""
    return followed(schema, root, [most])


def followed(schema: Any, root: Mapping[str, Any], left: list[int]) -> frozenset[str]:
    """The same; `left` is how many parts may be followed, and from then on still may."""
    left[0] -= 1
    if left[0] < 0:
        return TYPES
    schema = resolved(schema, root)
    found = _own_types(schema)
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            # One more than is left has all types, as any after it.
            some = branches[: max(0, left[0]) + 1]
            found &= frozenset().union(*(followed(branch, root, left) for branch in some))
    together = schema.get("allOf")
    for branch in together[: max(0, left[0]) + 1] if isinstance(together, list) else ():
        found &= followed(branch, root, left)
    return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    listed = listed_values(schema)
    if listed is not None:
        return frozenset(type_of(value) for value in listed)
    hints = frozenset(kind for keyword, kind in HINTS.items() if keyword in schema)
    return hints or TYPES


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of `enum` or `const`; None where neither is there."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def type_of(value: Any) -> str:
    kinds: Iterable[tuple[type, str]] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")
