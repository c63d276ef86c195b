"""A Grammar in llguidance's own form. Pure."""

from __future__ import annotations

import json

from kvline_server.grammars import lark
from kvline_server.grammars.grammar import COMPACT, OVERRIDES, Grammar

ANSWER = "answer"  # in what stands around it


def lark_of_choices(text: str) -> str:
    """Of a JSON list. One terminal: as many would be more than a step of the parser may have."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(lark.quoted, json.loads(text)))


def with_whitespace(schema: str, whitespace: str) -> str:
    """A JSON schema, an object, with what llguidance reads of whitespace."""
    options: dict[str, object] = {"whitespace_pattern": whitespace}
    if whitespace == COMPACT:
        options = {"whitespace_flexible": False}
    rest = schema.lstrip()[1:]
    comma = "" if rest.lstrip().startswith("}") else ","
    return f"{{{json.dumps(OVERRIDES)}:{json.dumps(options)}{comma}{rest}"


def source(grammar: Grammar) -> str:
    """What llguidance takes: Lark, or its JSON."""
    if grammar.kind in ("json_schema", "json_object"):
        schema = grammar.text if grammar.kind == "json_schema" else '{"type":"object"}'
        answer = f'"json_schema":{with_whitespace(schema, grammar.whitespace)}'
    elif not grammar.around:
        return _lark(grammar)
    else:
        answer = f'"lark_grammar":{json.dumps(_lark(grammar))}'
    if not grammar.around:
        return f'{{"grammars":[{{{answer}}}]}}'
    around = f'{{"lark_grammar":{json.dumps(grammar.around)}}}'
    return f'{{"grammars":[{around},{{"name":"{ANSWER}",{answer}}}]}}'


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "choice":
        return lark_of_choices(grammar.text)
    if grammar.kind == "regex":
        return f"start: {lark.regex(grammar.text)}"
    return grammar.text
