"""What pydantic found wrong with a request, as the one error that its client gets.

A union's arms each have errors, most of them about a type that the client never meant: the arm that
the value has the type of is the one to name. Codes and the notation of `param` are OpenAI's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvline_server.http.errors import BadRequest

Path = list[str | int]
KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
RANGES = {
    "greater_than": ("gt", "below_min_value"),
    "greater_than_equal": ("ge", "below_min_value"),
    "less_than": ("lt", "above_max_value"),
    "less_than_equal": ("le", "above_max_value"),
}
CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    **dict.fromkeys(KINDS, "invalid_type"),
}


class UnsupportedValue(ValueError):
    """A value that OpenAI's API has and this server does not."""

    code = "unsupported_value"


class EmptyArray(ValueError):
    code = "empty_array"


def bad_request(kind: type[BaseModel], found: ValidationError) -> BadRequest:
    """The first wrong field's error: its name, what is taken and a code, never its value."""
    first, expected = _clearest(found.errors(include_url=False, include_input=False))
    path, message = _path(first), expected or _message(first)
    if first["type"] == "value_error" and ": " in message:  # the message starts with the field
        name, _, message = message.partition(": ")
        path.append(name)
    if first["type"] in RANGES and len(path) == 1:
        message = f"must be {_ranges(kind)[str(path[0])]}"
    name = _name(path)[:100]
    return BadRequest(f"{name}: {message}" if name else message, name, _code(first))


def _clearest(errors: list[ErrorDetails]) -> tuple[ErrorDetails, str]:
    """The first field's error, of the arm of a union that the value has the type of. -> the error,
    and what the field takes where its value has no arm's type"""
    first = errors[0]
    arm = next((i for i, part in enumerate(first["loc"]) if _is_union_arm(part)), None)
    if arm is None:
        return first, ""
    arms = [e for e in errors if e["loc"][:arm] == first["loc"][:arm]]
    inner = [e for e in arms if len(e["loc"]) > arm + 1 or e["type"] == "value_error"]
    meant = inner + [e for e in arms if e["type"] not in KINDS]
    if meant:
        return meant[0], ""
    return first, f"must be {' or '.join(KINDS[e['type']] for e in arms)}"


def _message(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a field that this server supports"
    if error["type"] == "missing":
        return "is required"
    if error["type"] in KINDS:
        return f"must be {KINDS[error['type']]}"
    if error["type"] == "too_long":
        return f"has more than {error['ctx']['max_length']} items"
    if error["type"] == "too_short":
        return "must not be empty"
    return str(error["msg"]).removeprefix("Value error, ")


def _code(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in RANGES:
        bound, code = RANGES[kind]
        return f"{'decimal' if isinstance(context[bound], float) else 'integer'}_{code}"
    if kind in ("too_long", "too_short"):
        if context["field_type"] == "Dictionary":
            return "object_above_max_properties"
        if not context["actual_length"]:
            return "empty_array"
        return f"array_{'above_max' if kind == 'too_long' else 'below_min'}_length"
    return str(getattr(context.get("error"), "code", CODES.get(kind, "invalid_value")))


def _path(error: ErrorDetails) -> Path:
    return [part for part in error["loc"] if not _is_union_arm(part)]


def _name(path: Path) -> str:
    """As OpenAI writes it: messages[0].content."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    text = text.replace(".[", "[")  # a list's item, which a validator named
    return text.removeprefix(".")


@cache
def _ranges(kind: type[BaseModel]) -> dict[str, str]:
    """The range of each numeric field, as text."""
    out = {}
    for name, schema in kind.model_json_schema()["properties"].items():
        for arm in (schema, *schema.get("anyOf", ())):
            if "maximum" in arm:
                low = arm.get("minimum", arm.get("exclusiveMinimum"))
                out[name] = f"{'from' if 'minimum' in arm else 'above'} {low} to {arm['maximum']}"
    return out


def _is_union_arm(part: Any) -> bool:
    """pydantic adds the type that it tried to the path of a union's error."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "constrained-str", "NamedTool", "NamedFunction")
    )
