"""A grammar for the calls that a request demands: in the form that the model's family writes, with
arguments by each tool's schema.

llguidance compiles it, elsewhere: nothing here imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from kvline_server.formats.format import HARMONY, Body, Format, Layout, Opening
from kvline_server.formats.grammar_python import python_arguments
from kvline_server.formats.grammar_xml import xml_parameters
from kvline_server.formats.harmony import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, START
from kvline_server.formats.json_text import quoted
from kvline_server.formats.lark import ANY, GrammarTooLarge, Rules, literal, regex, without
from kvline_server.formats.schemas import check_name, object_schema
from kvline_server.formats.tools import Tool, ToolRefused

BLANKS = "[ \\n]{0,2}"  # before the first call: what templates write behind reasoning
END = "<|end|>"
# Where llguidance found it, and the grammar's lines around, that no client has sent.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_LINES = re.compile(r"\n +\d+ \| ")
ANSWER = "@answer"  # another grammar, in that of what stands around it


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's `tool_choice`, where it needs a grammar."""

    kind: Literal["auto", "required", "named"]
    name: str = ""  # of the tool, where one is named


def grammar(
    format: Format,
    tools: Sequence[Tool],
    choice: Choice,
    parallel: bool,
    ids: Mapping[str, int],
    thought: str = "",
) -> str:
    """The grammar of an answer, in llguidance's Lark. `ids`: the tokenizer's added tokens by their
    text; `thought`: the reasoning before it (thought.py). With `auto`, text is free up to the mark
    of a call, and a tool that is not strict takes any object. Raises ToolRefused where the format
    cannot express a schema, and GrammarTooLarge."""
    optional = choice.kind == "auto"
    if choice.kind == "named":
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    if optional:
        tools = _as_strict(tools)
    rules = Rules(ids, format.marks())
    if format is HARMONY:
        return rules.lark(_harmony(rules, tools, optional))
    openings = _expressible(format, tools)
    if not optional:
        return rules.lark(f"{thought} {_calls(rules, openings, tools, parallel)}")
    if openings[0].mark:
        return rules.lark(f"{thought} {_among_text(rules, openings[0], tools, parallel)}")
    groups = [_group(rules, each, tools, parallel) for each in openings]
    return rules.lark(f"{thought} ({' | '.join((*groups, _other_text(rules, format)))})")


def around(
    format: Format | None,
    tools: Sequence[Tool],
    parallel: bool,
    ids: Mapping[str, int],
    thought: str,
) -> str:
    """What may stand before an answer that follows another grammar, and the calls that may stand in
    its place, whose format has a mark; empty where that answer stands alone. Raises ToolRefused and
    GrammarTooLarge."""
    tools = _as_strict(tools)
    rules = Rules(ids, format.marks() if format is not None else ())
    if format is HARMONY and _missing(rules) is None:
        return rules.lark(_harmony_around(rules, tools))
    if format is None or not tools:
        return rules.lark(f"{thought} {ANSWER}") if thought else ""
    calls = _calls(rules, _expressible(format, tools), tools, parallel)
    return rules.lark(f"{thought} ({calls} | {ANSWER})")


def _as_strict(tools: Sequence[Tool]) -> list[Tool]:
    """One that is not takes any object."""
    return [tool if tool.strict else Tool(tool.name, {}) for tool in tools]


def each_alone(
    format: Format, tools: Sequence[Tool], choice: Choice, ids: Mapping[str, int]
) -> Iterator[tuple[Tool, str]]:
    """The grammar of each tool that is guaranteed, to find the one for which that of all of them is
    refused. Raises ToolRefused and GrammarTooLarge."""
    for tool in tools:
        guaranteed = tool.strict if choice.kind == "auto" else True
        if choice.kind == "named":
            guaranteed = tool.name == choice.name
        if guaranteed:
            yield tool, grammar(format, [tool], Choice("required"), False, ids)


def schema_reason(reason: str) -> str:
    """What llguidance says of a schema in a grammar from here, without the lines of the grammar."""
    return _PLACE.sub("", _LINES.split(reason, maxsplit=1)[0])


def _expressible(format: Format, tools: Sequence[Tool]) -> list[Opening]:
    """The ways to write calls in which every tool can be called; any is enough."""
    found, problem = [], None
    for opening in format.written():
        rules = Rules({}, ())
        try:
            for number, tool in enumerate(tools):
                with _grammar_of(tool):
                    _call(rules, f"tried-{number}", opening, tool)
        except ToolRefused as refused:
            problem = problem or refused
        else:
            found.append(opening)
    if not found and problem is not None:
        raise problem
    return found


@contextmanager
def _grammar_of(tool: Tool) -> Iterator[None]:
    """Raises ToolRefused where it is too large."""
    try:
        yield
    except GrammarTooLarge as large:
        raise ToolRefused(tool.name, f"{large}, with the tools before it") from None


def _calls(rules: Rules, openings: Sequence[Opening], tools: Sequence[Tool], parallel: bool) -> str:
    """Nothing but calls, in one of the ways to write them."""
    groups = [_group(rules, each, tools, parallel) for each in openings]
    return f"{rules.add('BLANKS', regex(BLANKS))} ({' | '.join(groups)})"


def _group(rules: Rules, opening: Opening, tools: Sequence[Tool], parallel: bool) -> str:
    """One or more calls, as they follow each other."""
    layout, name = opening.layout, opening.body.name.lower()
    assert layout is not None
    calls = [_call(rules, f"{name}-{n}", opening, tool) for n, tool in enumerate(tools)]
    call = rules.add(f"{name}-call", " | ".join(calls))
    more = f"({rules.text(layout.between)} {call})*" if parallel else ""
    parts = (rules.text(layout.before), call, more, rules.text(layout.after))
    return rules.add(f"{name}-calls", " ".join(part for part in parts if part))


def _call(rules: Rules, name: str, opening: Opening, tool: Tool) -> str:
    layout = opening.layout
    assert layout is not None
    before, _, rest = layout.call.partition("$name")
    between, _, after = rest.partition("$arguments")
    in_quotes = opening.body is Body.JSON
    written = quoted(tool.name) if in_quotes else check_name(tool, tool.name)
    if opening.body is Body.PYTHON:
        arguments = python_arguments(rules, f"{name}-arguments", tool)
    elif opening.body is Body.XML:
        arguments = xml_parameters(rules, f"{name}-arguments", tool)
    else:
        arguments = rules.json(f"{name}-arguments", object_schema(tool))
    parts = (rules.text(before), literal(written), rules.text(between), arguments)
    return rules.add(name, " ".join(part for part in (*parts, rules.text(after)) if part))


def _other_text(rules: Rules, format: Format) -> str:
    """An answer that does not begin as calls do."""
    firsts = "".join(f"\\{each.first}" for each in format.written())
    return rules.add("TEXT", regex(f"[ \\n\\t\\r]*([^ \\n\\t\\r{firsts}]{ANY})?"))


def _among_text(rules: Rules, opening: Opening, tools: Sequence[Tool], parallel: bool) -> str:
    """Free text, and calls from their mark on."""
    mark, layout = opening.mark, opening.layout
    assert layout is not None
    rest = Layout(
        call=layout.call.removeprefix(mark) if not layout.before else layout.call,
        before=layout.before.removeprefix(mark),
        between=layout.between,
        after=layout.after,
    )
    # Where each call has a mark of its own, the text between two is free, too.
    group = _group(rules, replace(opening, layout=rest), tools, parallel and bool(layout.before))
    rules.add("TEXT", without("(?s:.+)", {mark}))
    if rules.is_token(mark):
        head = f"TEXT? {rules.mark(mark)}"
    else:  # one terminal: where it ends, its text cannot go on
        head = rules.add("HEAD", f"{without(ANY, {mark})} {literal(mark)}")
    return f"({head} {group}){'*' if parallel else '?'} TEXT?"


def _harmony(rules: Rules, tools: Sequence[Tool], optional: bool) -> str:
    """Messages up to the one that ends the answer, which is a call. The end of that is the end
    of the sequence."""
    if (mark := _missing(rules)) is not None:
        raise ToolRefused(tools[0].name, f"{mark} is no token of this model's tokenizer")
    call, analysis = _harmony_call(rules, tools), _harmony_analysis(rules)
    if not optional:
        return f"{analysis}* {call}"
    following = rules.text(f"{END}{START}assistant")
    preamble = rules.add("preamble", f"{_header(rules, 'commentary')} TEXT? {following}")
    final = rules.add("final", f"{_header(rules, 'final')} TEXT?")
    return f"({analysis} | {preamble})* ({call} | {final})"


def _harmony_around(rules: Rules, tools: Sequence[Tool]) -> str:
    """The same, with another grammar for the message to the user."""
    analysis, final = _harmony_analysis(rules), f"{_header(rules, 'final')} {ANSWER}"
    if not tools:
        return f"{analysis}* {final}"
    return f"{analysis}* ({_harmony_call(rules, tools)} | {final})"


def _missing(rules: Rules) -> str | None:
    """A mark of harmony's that is no token."""
    marks = (CHANNEL, MESSAGE, CONSTRAIN, START, END)
    return next((mark for mark in marks if not rules.is_token(mark)), None)


def _harmony_analysis(rules: Rules) -> str:
    rules.add("TEXT", regex("(?s:.+)"))
    following = rules.text(f"{END}{START}assistant")
    return rules.add("analysis", f"{_header(rules, 'analysis')} TEXT? {following}")


def _header(rules: Rules, channel: str) -> str:
    return rules.text(f"{CHANNEL}{channel}{MESSAGE}")


def _harmony_call(rules: Rules, tools: Sequence[Tool]) -> str:
    calls = []
    for number, tool in enumerate(tools):
        name = check_name(tool, tool.name)
        with _grammar_of(tool):
            arguments = rules.json(f"arguments-{number}", object_schema(tool))
        header = f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"
        calls.append(rules.add(f"call-{number}", f"{rules.text(header)} {arguments}"))
    return rules.add("call", " | ".join(calls))
