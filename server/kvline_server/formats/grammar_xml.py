"""The parameters of a call that is written between marks, as rules of a grammar.

A string is written as it is, so its closing mark cannot be a part of it; what else a schema asks
of a string becomes a regular expression.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvline_server.formats.keywords import ASSERTIONS
from kvline_server.formats.lark import ANY, Rules, escaped, lacking, literal, regex, without
from kvline_server.formats.reader import MAX_NAME
from kvline_server.formats.schemas import Parameter, check_alone, parameters
from kvline_server.formats.tools import (
    MOST_SCHEMAS,
    TYPES,
    Tool,
    ToolRefused,
    listed_values,
    resolved,
    type_of,
)
from kvline_server.formats.xml_calls import END_PARAMETER, PARAMETER

CLOSE = f"\n{END_PARAMETER}\n"
VALUE = lacking(END_PARAMETER)
FREE_NAME = 64  # characters of a parameter that no schema names
MOST_ALTERNATIVES = 100  # of one string: a few that refer to each other may have any number
_BESIDE_VALUES = {"type", "enum", "const", "minLength", "maxLength"}
_BRANCHES = {"anyOf", "oneOf"}
_BESIDE_BRANCHES = {"pattern", "minLength", "maxLength", "enum", "const"}
_UNKEPT = ("format", "not", "if", "allOf", "contentSchema")  # of a string


def xml_parameters(rules: Rules, name: str, tool: Tool) -> str:
    """In the order of the schema; without one, any that are strings."""
    if not tool.parameters:
        value = rules.add(f"{name}-value".upper(), f"{regex(VALUE)} {literal(CLOSE)}")
        key = rules.add(f"{name}-key".upper(), regex(f"[^<>\\n]{{1,{FREE_NAME}}}"))
        return f"({literal(PARAMETER)} {key} {literal('>' + CLOSE[0])} {value})*"
    parts = []
    for number, parameter in enumerate(parameters(tool)):
        one = _parameter(rules, f"{name}-{number}", tool, parameter)
        parts.append(one if parameter.required else f"{one}?")
    return " ".join(parts)


def _parameter(rules: Rules, name: str, tool: Tool, parameter: Parameter) -> str:
    key = parameter.name
    if not key or any(each in key for each in "<>\n") or len(key) > MAX_NAME:
        raise ToolRefused(tool.name, f"this model's format cannot write the name {key!r:.80}")
    before = literal(f"{PARAMETER}{key}>\n")
    root = parameter.schema
    schema = resolved(root, root)
    listed, found = listed_values(schema), rules.types(root, root)
    if listed is not None:
        check_alone(tool, root, root, key)
        value = _listed(tool, key, schema, found)
    elif "string" in found:
        value = _strings(rules, f"{name}-value".upper(), tool, key, root)
        if "null" in found and found != TYPES:
            value = f"({value} | {literal(f'null{CLOSE}')})"
    else:
        value = f"{rules.json(f'{name}-value', root)} {literal(CLOSE)}"
    return rules.add(name, f"{before} {value}")


def _listed(tool: Tool, key: str, schema: Mapping[str, Any], found: frozenset[str]) -> str:
    kinds = found | ({"integer"} if "number" in found else frozenset())
    values = [value for value in _values(tool, key, schema) if type_of(value) in kinds]
    if not values:
        raise ToolRefused(tool.name, f"{key!r}: none of its values is of its type")
    texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    for text in texts:
        if END_PARAMETER in text:
            raise ToolRefused(tool.name, f"{key!r}: a value has {END_PARAMETER} in it")
    return f"({' | '.join(literal(text + CLOSE) for text in texts)})"


def _values(tool: Tool, key: str, schema: Mapping[str, Any]) -> list[Any]:
    """Of `enum` or `const`, by the lengths that stand beside it."""
    beside = ASSERTIONS & schema.keys() - _BESIDE_VALUES
    if beside or {"enum", "const"} <= schema.keys():
        raise ToolRefused(
            tool.name, f"{key!r}: {min(beside or {'const'})!r} beside its values cannot be kept"
        )
    least, most = (_length(tool, key, schema, name) for name in ("minLength", "maxLength"))
    return [
        value
        for value in listed_values(schema) or []
        if not isinstance(value, str)
        or (len(value) >= int(least or 0) and (not most or len(value) <= int(most)))
    ]


def _strings(rules: Rules, name: str, tool: Tool, key: str, root: Mapping[str, Any]) -> str:
    """One terminal with its closing mark: where it ends, the string cannot go on."""
    added: dict[str, str] = {}
    for body in _Alternatives(rules, tool, key, root).bodies(root, 8):
        if body not in added:
            added[body] = rules.add(f"{name}-{len(added)}", f"{body} {literal(CLOSE)}")
    if not added:
        raise ToolRefused(
            tool.name, f"{key!r}: no string among the first {MOST_SCHEMAS} parts of its schema"
        )
    return f"({' | '.join(added.values())})"


@dataclass(slots=True)
class _Alternatives:
    """Of a parameter that may be a string."""

    rules: Rules
    tool: Tool
    key: str
    root: Mapping[str, Any]
    left: int = MOST_ALTERNATIVES

    def bodies(self, schema: Any, depth: int) -> Iterator[str]:
        """A terminal for each that is a string."""
        check_alone(self.tool, schema, self.root, self.key)
        schema = resolved(schema, self.root)
        for keyword in _UNKEPT:
            if keyword in schema:
                raise self._refused(
                    f"{keyword!r} of a string cannot be kept in this model's format"
                )
        branches = schema.get("anyOf", schema.get("oneOf"))
        if branches is None:
            yield _body(self.tool, self.key, schema)
            return
        if not isinstance(branches, list):
            raise self._refused("its alternatives must be a list")
        self.left -= len(branches)
        if self.left < 0:
            raise self._refused(
                f"more than {MOST_ALTERNATIVES} alternatives, with those of what it refers to; "
                "use enum for values"
            )
        strings = [each for each in branches if "string" in self.rules.types(each, self.root)]
        several = "oneOf" in schema and len(strings) > 1
        if several or not depth or _BESIDE_BRANCHES & schema.keys() or schema.keys() >= _BRANCHES:
            raise self._refused("these alternatives of a string cannot be kept in this format")
        for each in strings:
            yield from self.bodies(each, depth - 1)

    def _refused(self, reason: str) -> ToolRefused:
        return ToolRefused(self.tool.name, f"{self.key!r}: {reason}")


def _body(tool: Tool, key: str, schema: Mapping[str, Any]) -> str:
    if listed_values(schema) is not None:
        texts = [value for value in _values(tool, key, schema) if isinstance(value, str)]
        return without(f"({'|'.join(map(escaped, texts))})", {END_PARAMETER})
    body = regex(VALUE)
    least, most = (_length(tool, key, schema, name) for name in ("minLength", "maxLength"))
    if least and most and int(least) > int(most):
        raise ToolRefused(
            tool.name, f"{key!r}: 'minLength' {least} is more than 'maxLength' {most}"
        )
    if least or most:
        body = f"{body} & {regex(f'(?s:.){{{least or 0},{most}}}')}"
    if "pattern" in schema:
        body = f"{body} & {regex(_pattern(tool, key, str(schema['pattern'])))}"
    return f"({body})"


def _length(tool: Tool, key: str, schema: Mapping[str, Any], name: str) -> str:
    value = schema.get(name)
    if value is None:
        return ""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ToolRefused(tool.name, f"{key!r}: {name!r} must be a whole number, got {value!r:.80}")
    return str(value)


def _pattern(tool: Tool, key: str, pattern: str) -> str:
    """As a schema has it, a pattern may match anywhere."""
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _alternatives(inner):
        raise ToolRefused(
            tool.name, f"{key!r}: in its pattern, ^ or $ is of one alternative alone; use groups"
        )
    return f"{'' if begins else ANY}({inner}){'' if ends else ANY}"


def _alternatives(pattern: str) -> bool:
    """Whether a `|` stands outside of all groups."""
    depth, in_class, skipped = 0, False, False
    for each in pattern:
        if skipped or each == "\\":
            skipped = not skipped
        elif in_class or each == "[":
            in_class = each != "]"
        elif each in "()":
            depth += 1 if each == "(" else -1
        elif each == "|" and not depth:
            return True
    return False
