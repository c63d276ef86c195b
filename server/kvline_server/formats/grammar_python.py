"""The arguments of a call in Python, as rules of a grammar."""

from __future__ import annotations

from kvline_server.formats.keywords import ASSERTIONS
from kvline_server.formats.lark import Rules, literal, regex
from kvline_server.formats.schemas import Parameter, check_name, parameters
from kvline_server.formats.tools import Tool


def python_arguments(rules: Rules, name: str, tool: Tool) -> str:
    """`a=1, b="x"`, in the order of the schema. Within a list or an object, values are JSON's,
    which are read as well."""
    if not tool.parameters:  # any, by any names
        key = rules.add(f"{name}-key".upper(), regex(r"[a-z_][a-z_0-9]{0,63}="))
        one = rules.add(f"{name}-any", f"{key} {rules.json(f'{name}-value', {})}")
        return f'({one} (", " {one})*)?'
    given = parameters(tool)
    if not given:
        return ""
    first, more = "", ""  # what may follow, from the last parameter to the first
    for number, parameter in reversed(list(enumerate(given))):
        one = _argument(rules, f"{name}-{number}", tool, parameter)
        behind = f" {more}" if more else ""
        alone = f"{one}{behind}"
        if not parameter.required:
            alone = f"{alone} | {first}" if first else f"({alone})?"
        first = rules.add(f"{name}-first-{number}", alone)
        following = f'", " {one}'
        if not parameter.required:
            following = f"({following})?"
        more = rules.add(f"{name}-more-{number}", f"{following}{behind}")
    return first


def _argument(rules: Rules, name: str, tool: Tool, parameter: Parameter) -> str:
    found = rules.types(parameter.schema, parameter.schema)
    plain = ASSERTIONS & parameter.schema.keys() == {"type"}  # and all of its type is valid
    if plain and found == {"boolean"}:
        value = '("True" | "False")'
    elif plain and found == {"null"}:
        value = '"None"'
    else:
        value = rules.json(f"{name}-value", parameter.schema)
    return rules.add(name, f"{literal(check_name(tool, parameter.name) + '=')} {value}")
