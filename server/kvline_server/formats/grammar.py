"""A grammar for the calls that a request demands: in the form that the model's family writes, with
arguments by each tool's schema.

It begins where reasoning ends. llguidance compiles it, elsewhere: nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvline_server.formats.format import HARMONY, Body, Format, Layout, Opening
from kvline_server.formats.grammar_python import python_arguments
from kvline_server.formats.grammar_xml import xml_parameters
from kvline_server.formats.harmony import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, START
from kvline_server.formats.json_text import quoted
from kvline_server.formats.lark import ANY, Rules, literal, regex, without
from kvline_server.formats.schemas import check_name, object_schema
from kvline_server.formats.tools import Tool, ToolRefused

BLANKS = "[ \\n]{0,2}"  # before the first call: what templates write behind reasoning
END = "<|end|>"


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
) -> str:
    """The grammar of an answer, in llguidance's Lark. `ids`: the tokenizer's added tokens by their
    text. With `auto`, text is free up to the mark of a call, and a tool that is not strict takes
    any object. Raises ToolRefused where the format cannot express a schema."""
    optional = choice.kind == "auto"
    if choice.kind == "named":
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    if optional:
        tools = [tool if tool.strict else Tool(tool.name, {}) for tool in tools]
    rules = Rules(ids, format.marks())
    if format is HARMONY:
        return rules.lark(_harmony(rules, tools, optional))
    openings = _expressible(format, tools)
    if not optional:
        groups = [_group(rules, each, tools, parallel) for each in openings]
        rules.add("BLANKS", regex(BLANKS))
        return rules.lark(f"BLANKS ({' | '.join(groups)})")
    if openings[0].mark:
        return rules.lark(_among_text(rules, openings[0], tools, parallel))
    groups = [_group(rules, each, tools, parallel) for each in openings]
    return rules.lark(" | ".join((*groups, _other_text(rules, format))))


def check(
    format: Format,
    tools: Sequence[Tool],
    choice: Choice,
    ids: Mapping[str, int],
    refusal: Callable[[str], str],
) -> None:
    """Finds the tool for which a grammar is refused. `refusal` is llguidance's own answer to a
    grammar, empty where it takes it. Raises ToolRefused with the first one's text."""
    for tool in tools:
        guaranteed = tool.strict if choice.kind == "auto" else True
        if choice.kind == "named":
            guaranteed = tool.name == choice.name
        if not guaranteed:
            continue
        alone = grammar(format, [tool], Choice("required"), False, ids)
        if reason := refusal(alone):
            raise ToolRefused(tool.name, reason)


def _expressible(format: Format, tools: Sequence[Tool]) -> list[Opening]:
    """The ways to write calls in which every tool can be called; any is enough."""
    found, problem = [], None
    for opening in format.written():
        try:
            for tool in tools:
                _call(Rules({}, ()), "tried", opening, tool)
        except ToolRefused as refused:
            problem = problem or refused
        else:
            found.append(opening)
    if not found and problem is not None:
        raise problem
    return found


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
    for mark in (CHANNEL, MESSAGE, CONSTRAIN, START, END):
        if not rules.is_token(mark):
            raise ToolRefused(tools[0].name, f"{mark} is no token of this model's tokenizer")
    rules.add("TEXT", regex("(?s:.+)"))
    calls = []
    for number, tool in enumerate(tools):
        name = check_name(tool, tool.name)
        arguments = rules.json(f"arguments-{number}", object_schema(tool))
        header = f"{CHANNEL}commentary to={FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"
        calls.append(rules.add(f"call-{number}", f"{rules.text(header)} {arguments}"))
    call = rules.add("call", " | ".join(calls))

    def message(channel: str) -> str:
        return f"{rules.text(f'{CHANNEL}{channel}{MESSAGE}')} TEXT?"

    following = rules.text(f"{END}{START}assistant")
    analysis = rules.add("analysis", f"{message('analysis')} {following}")
    if not optional:
        return f"{analysis}* {call}"
    preamble = rules.add("preamble", f"{message('commentary')} {following}")
    final = rules.add("final", message("final"))
    return f"({analysis} | {preamble})* ({call} | {final})"
