"""Random walks through grammars of tool calls, the calls that are read from one, and whether they
are valid."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import llguidance
import numpy as np
from tool_families import ALL, EOS, ids, pieces, summed, tokens

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event
from kvline_server.formats.parser import Reads, parser
from kvline_server.formats.tools import Tool

DRAFTS = (
    jsonschema.Draft202012Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft4Validator,
    jsonschema.Draft3Validator,
)
# A date may have a day that its month lacks (docs/structured-output.md).
FORMATS = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
MOST = 3000  # tokens of a walk; from PATIENCE on, texts that close are tried first
PATIENCE = 150
CLOSING = ["\n</parameter>\n", '"', "}", "]", ")", "\n", "</function>\n", "1"]


@cache
def tokenizer(name: str) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokens(name).tokenizer.to_str(), eos_token=ids(name)[EOS])


def compiled(name: str, lark: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(
        tokenizer(name), llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    assert not made.is_error(), (made.get_error(), lark)
    return made


def walk(name: str, lark: str, chosen: random.Random) -> tuple[list[int], bool]:
    """-> tokens that the grammar allows one after the other; whether they came to an end"""
    matcher, out = compiled(name, lark), list[int]()
    closing = [tokens(name).tokenizer.encode(text).ids for text in CLOSING]
    planned: list[int] = []
    while len(out) < MOST:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert allowed.size and not matcher.is_error(), matcher.get_error()
        if not planned and len(out) > PATIENCE and chosen.random() < 0.5:
            planned = list(chosen.choice(closing))
        token = planned.pop(0) if planned else int(chosen.choice(allowed))
        if token not in allowed:
            planned = []
            continue
        if token == ids(name)[EOS]:
            return out, True
        assert matcher.consume_token(token), matcher.get_error()
        out.append(token)
        if matcher.is_stopped():
            return out, True
    return out, False


def read(
    name: str, tools: Sequence[Tool], walked: list[int], ended: bool, only_calls: bool = False
) -> list[Event]:
    family = ALL[name]
    reads = Reads(family.format, tools, family.thinking, constrained=True, only_calls=only_calls)
    made = parser(reads, ids(name))
    events = made.feed(pieces(name, walked))
    return summed([*events, *made.end("stop" if ended else "length")])


def calls(events: Sequence[Event]) -> list[tuple[str, str, bool]]:
    out: list[tuple[str, str, bool]] = []
    for event in events:
        if isinstance(event, CallStart):
            out.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            out[-1] = (out[-1][0], out[-1][1] + event.text, False)
        elif isinstance(event, CallEnd):
            out[-1] = (out[-1][0], out[-1][1], event.complete)
    return out


def check_valid(
    tools: Sequence[Tool], found: Sequence[tuple[str, str, bool]], strict: bool
) -> None:
    by_name = {tool.name: tool for tool in tools}
    for name, arguments, complete in found:
        if complete:
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if strict or by_name[name].strict:
                validate(value, by_name[name].parameters)


def validate(value: object, schema: Mapping[str, Any]) -> None:
    validator(json.dumps(schema)).validate(value)


@cache
def validator(schema: str) -> Any:
    """By the first draft in which it is a schema: llguidance keeps what older ones have."""
    for draft in DRAFTS:
        if draft(draft.META_SCHEMA).is_valid(json.loads(schema)):
            return draft(json.loads(schema), format_checker=FORMATS)
    raise AssertionError(f"accepted, and a schema of no draft: {schema}")
