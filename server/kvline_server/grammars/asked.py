"""What requests ask, as a Grammar: OpenAI's `response_format` and vLLM's `structured_outputs`.

Pure. A schema is enforced whether `strict` is set or not; what cannot be enforced is refused by
name, here or where it is compiled, and nothing is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvline_server.grammars.grammar import (
    COMPACT,
    MAX_CHOICES,
    MAX_PATTERN,
    WHITESPACE,
    Grammar,
    GrammarInvalid,
    checked,
    object_of,
    schema_text,
    text_of,
)
from kvline_server.grammars.lark import Marks
from kvline_server.grammars.tags import structural_tag

ONE_OF = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
WITH_JSON = ("json", "json_object", "structural_tag")
FORMATS = "text, json_object, json_schema or structural_tag"


def asked(response_format: Any, structured_outputs: Any, known: Marks) -> Grammar | None:
    """Of a request's two fields, None where neither asks for anything; `known` are the tokens that
    structural tags may name. Raises GrammarInvalid."""
    grammar = of_response_format(response_format, known)
    if structured_outputs is None:
        return grammar
    if grammar is not None:
        message = "beside response_format; a request has one of the two"
        raise GrammarInvalid(message, "structured_outputs")
    return of_structured_outputs(structured_outputs, known)


def of_response_format(value: Any, known: Marks) -> Grammar | None:
    param = "response_format"
    if value is None:
        return None
    fields = object_of(value, param)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        return _of_json_schema(fields.get("json_schema"), f"{param}.json_schema")
    if kind == "structural_tag":
        return structural_tag(fields, WHITESPACE, known, param)
    raise GrammarInvalid(f"expected {FORMATS}, got {_shown(kind)}", f"{param}.type")


def _of_json_schema(value: Any, param: str) -> Grammar:
    fields = object_of(value, param)
    if unknown := sorted(fields.keys() - {"name", "description", "schema", "strict"}):
        raise GrammarInvalid("this field is not known", f"{param}.{unknown[0]}")
    for name, kind, expected in (
        ("name", str, "a text"),
        ("description", str, "a text"),
        ("strict", bool, "true or false"),
    ):
        given = fields.get(name)
        if given is not None and not isinstance(given, kind):
            raise GrammarInvalid(f"expected {expected}", f"{param}.{name}")
    return Grammar("json_schema", schema_text(fields.get("schema"), f"{param}.schema"))


def of_structured_outputs(value: Any, known: Marks) -> Grammar | None:
    param = "structured_outputs"
    fields = {name: given for name, given in object_of(value, param).items() if given is not None}
    _check_options(fields, param)
    wanted = [name for name in ONE_OF if fields.get(name, False) is not False]
    if len(wanted) != 1:
        got = " and ".join(wanted) or "none of them"
        raise GrammarInvalid(f"expected one of {', '.join(ONE_OF)}; got {got}", param)
    (name,) = wanted
    given, where = fields[name], f"{param}.{name}"
    whitespace = _whitespace(fields, name in WITH_JSON, param)
    if name == "json":
        return Grammar("json_schema", schema_text(parsed(given, where), where), whitespace)
    if name == "json_object":
        return Grammar("json_object", whitespace=whitespace)
    if name == "structural_tag":
        return structural_tag(object_of(parsed(given, where), where), whitespace, known, where)
    if name == "choice":
        return Grammar("choice", choices(given, where))
    if not isinstance(given, str) or not given:
        raise GrammarInvalid("expected a text that is not empty", where)
    return Grammar("regex" if name == "regex" else "lark", checked(given, where))


def _check_options(fields: Mapping[str, Any], param: str) -> None:
    flags = ("disable_any_whitespace", "disable_additional_properties", "json_object")
    if unknown := sorted(fields.keys() - {*ONE_OF, *flags, "whitespace_pattern"}):
        raise GrammarInvalid("this field is not known", f"{param}.{unknown[0]}")
    for name in flags:
        if not isinstance(fields.get(name, False), bool):
            raise GrammarInvalid("expected true or false", f"{param}.{name}")
    if fields.get("disable_additional_properties"):
        message = "not served; set additionalProperties to false in the schema instead"
        raise GrammarInvalid(message, f"{param}.disable_additional_properties")


def _whitespace(fields: Mapping[str, Any], is_json: bool, param: str) -> str:
    """That between the tokens of JSON."""
    pattern, compact = fields.get("whitespace_pattern"), fields.get("disable_any_whitespace")
    name = "whitespace_pattern" if pattern is not None else "disable_any_whitespace"
    where = f"{param}.{name}"
    if not compact and pattern is None:
        return WHITESPACE
    if not is_json:
        raise GrammarInvalid(f"goes with {' and '.join(WITH_JSON)} only", where)
    if compact and pattern is not None:
        raise GrammarInvalid("beside disable_any_whitespace; a request has one of the two", where)
    if pattern is None:
        return COMPACT
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise GrammarInvalid(f"expected a regex of 1 to {MAX_PATTERN} characters", where)
    return checked(pattern, where)


def choices(value: Any, param: str) -> str:
    expected = f"a list of 1 to {MAX_CHOICES} texts"
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise GrammarInvalid(f"expected {expected}", param)
    if not all(isinstance(each, str) for each in value):
        raise GrammarInvalid(f"expected {expected}", param)
    return checked(text_of(value, param), param)


def parsed(value: Any, param: str) -> Any:
    """A value that may be given as its JSON. Raises GrammarInvalid."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(checked(value, param))
    except ValueError as error:
        raise GrammarInvalid(f"expected an object or its JSON: {error}", param) from None
    except RecursionError:
        raise GrammarInvalid("too many objects and lists in each other", param) from None


def _shown(value: Any) -> str:
    return repr(value)[:40] if value is not None else "nothing"
