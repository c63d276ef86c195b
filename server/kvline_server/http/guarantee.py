"""What a request demands of its answer, as a grammar, and that grammar compiled.

Where the model reasons, its reasoning is a part of the grammar: it may come first, or comes to its
end, as the rendered prompt says (docs/structured-output.md).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvline_server.formats.detect import NoFormat, in_reasoning
from kvline_server.formats.format import HARMONY, Format
from kvline_server.formats.grammar import Choice, around, each_alone, grammar, schema_reason
from kvline_server.formats.lark import GrammarTooLarge
from kvline_server.formats.thought import Unmarked, thought
from kvline_server.formats.tools import Tool, ToolRefused
from kvline_server.grammars.asked import ONE_OF, asked
from kvline_server.grammars.compiler import Compiler, NotNow, NotServed
from kvline_server.grammars.grammar import Grammar, GrammarInvalid, checked
from kvline_server.grammars.lark import marks
from kvline_server.http.answering import Answering, choice, format_of_calls
from kvline_server.http.errors import BadRequest, NoGrammar
from kvline_server.http.generate import Generator
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import Strict
from kvline_server.http.protocol.tools import NO_PARAMETERS, Function
from kvline_server.http.tokens import Tokens
from kvline_server.options.grammars import HTTP_SECONDS

TOOLS = msgspec.json.Decoder(list[Tool])
SAME_START = (
    "this model's calls begin as JSON does, so an answer may not be either of the two; "
    'send tool_choice "none" or "required"'
)


@dataclass(frozen=True, slots=True)
class Demand:
    """Of a request, before its prompt is known."""

    param: str  # the field that asks for it
    answer: Grammar | None = None  # of its text
    choice: Choice | None = None  # of its calls, where they are guaranteed
    tools: list[Tool] = field(default_factory=list)  # that may be called
    parallel: bool = True
    model: Answering = field(default_factory=Answering)
    begins: bool = False  # the answer is a message of its own
    continued: str = ""  # or goes on with this one

    @property
    def format(self) -> Format | None:
        """Of what surrounds the answer: harmony's messages, if no calls."""
        format = self.model.format
        if isinstance(format, NoFormat):
            return None
        return format if self.tools or (format is HARMONY and self.begins) else None


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A demand as a grammar, with what is needed to say why it is refused."""

    grammar: Grammar
    param: str
    answer: Grammar | None
    choice: Choice | None
    tools: bytes  # JSON, which takes a fraction of their memory
    model: Answering


def demanded(request: GenerationRequest, generator: Generator) -> Demand | None:
    """None where every answer will do. Raises BadRequest."""
    answer, param = _answer(request, generator.tokens)
    demand = Demand(param, answer)
    if isinstance(request, ChatRequest) and generator.chat is not None:
        demand = _of_chat(request, demand, generator.chat.answering)
    if demand.answer is None and demand.choice is None:
        return None
    _check_whole(request)
    return demand


def guaranteed(demand: Demand, tokens: Tokens | None, prompt: str = "") -> Guarantee:
    """`prompt`: as it is rendered, of a chat. Raises BadRequest."""
    model, tools = demand.model, demand.tools
    try:
        before = _thought(demand, tokens, prompt)
        if demand.answer is not None:
            text = around(demand.format, tools, demand.parallel, model.ids, before)
            made = msgspec.structs.replace(demand.answer, around=checked(text, "tools"))
        else:
            assert demand.choice is not None and demand.format is not None
            text = grammar(demand.format, tools, demand.choice, demand.parallel, model.ids, before)
            made = Grammar("lark", checked(text, "tools"))
    except ToolRefused as refused:
        raise _tool_refused(refused, tools) from None
    except GrammarInvalid as invalid:
        raise BadRequest(str(invalid), invalid.param) from None
    except GrammarTooLarge as large:
        raise BadRequest(f"tools: {large}", "tools") from None
    except Unmarked as unmarked:
        message = f"{demand.param}: {unmarked}, so no answer behind it can be guaranteed"
        raise BadRequest(message, demand.param, "unsupported_value") from None
    kept = msgspec.json.encode(tools)
    return Guarantee(made, demand.param, demand.answer, demand.choice, kept, model)


async def compiled(
    compiler: Compiler | None, guarantee: Guarantee
) -> AbstractContextManager[bytes]:
    """The grammar's key, for which it is kept within. Raises BadRequest, NoGrammar."""
    param = guarantee.param
    if compiler is None:
        message = f"{param}: this server has no process that compiles grammars"
        raise BadRequest(message, param, "unsupported_value")
    try:
        return await compiler.compiled(guarantee.grammar)
    except NotNow as later:
        raise NoGrammar(f"{param}: {later}; try again later", param) from None
    except NotServed as refused:
        reason = str(refused)
    raise await _refusal(compiler, guarantee, reason)


def _answer(request: GenerationRequest, tokens: Tokens | None) -> tuple[Grammar | None, str]:
    """-> what its text must follow, and the field that says so. Raises BadRequest"""
    form, other = request.response_format, request.structured_outputs
    if form is None and other is None:
        return None, ""
    known = {} if tokens is None else marks(tokens.kinds())
    try:
        made = asked(_plain(form), _plain(other), known)
    except GrammarInvalid as invalid:
        raise BadRequest(str(invalid), invalid.param) from None
    if other is not None:
        given = _plain(other) or {}
        return made, f"structured_outputs.{next(name for name in ONE_OF if name in given)}"
    whole = form is not None and form.json_schema is not None
    return made, "response_format.json_schema.schema" if whole else "response_format"


def _plain(given: Strict | None) -> dict[str, Any] | None:
    """As it was sent, without nulls."""
    return None if given is None else given.model_dump(by_alias=True, exclude_unset=True)


def _of_chat(request: ChatRequest, demand: Demand, model: Answering) -> Demand:
    """With the calls that an answer may have, and where it begins. Raises BadRequest."""
    format, given = format_of_calls(request, model), request.tools or []
    kind = choice(request)
    if demand.answer is None and kind is None:
        return demand  # as of most requests
    begins, continued = request.generation_prompt(), request.continued()
    demand = replace(demand, model=model, begins=begins, continued=continued)
    if format is None:
        return demand
    param, answer = demand.param, demand.answer
    if kind is not None and kind.kind != "auto":
        param, answer = "tool_choice", None  # an answer of calls has no text
    elif kind is not None and answer is None:
        strict = [at for at, tool in enumerate(given) if tool.function.strict]
        param = f"tools[{strict[0]}].function.strict"
    if answer is not None and any(not each.mark for each in format.written()):
        raise BadRequest(f"{param}: {SAME_START}", param, "unsupported_value")
    tools = [_tool(tool.function) for tool in given]
    parallel = request.parallel_tool_calls is not False
    return replace(demand, param=param, answer=answer, choice=kind, tools=tools, parallel=parallel)


def _tool(given: Function) -> Tool:
    schema = NO_PARAMETERS if given.parameters is None else given.parameters
    return Tool(given.name, schema, given.strict)


def _check_whole(request: GenerationRequest) -> None:
    """Raises BadRequest by the first field that asks for another end, or for more, than a whole
    answer."""
    echo = isinstance(request, CompletionRequest) and request.echo
    for name, given in (
        ("stop", bool(request.stops())),
        ("min_tokens", request.min_tokens > 0),
        ("ignore_eos", request.ignore_eos),
        ("echo", echo),
        ("max_tokens", request.most() == 0),
    ):
        if given:
            what = "not where the form of an answer, or of its calls, is guaranteed"
            raise BadRequest(f"{name}: {what}; leave it out", name)


def _thought(demand: Demand, tokens: Tokens | None, prompt: str) -> str:
    """The reasoning before the answer, as Lark. Raises Unmarked."""
    model = demand.model
    if model.thinking is None or tokens is None:
        return ""
    begun = in_reasoning(model.thinking, prompt, demand.continued)
    # Where a request wants no reasoning, templates write all of it, an empty one.
    over = prompt.rstrip().endswith(model.thinking.close)
    may_begin = demand.begins and not over
    return thought(model.thinking, begun, may_begin, model.ids, marks(tokens.kinds()).values())


async def _refusal(compiler: Compiler, guarantee: Guarantee, reason: str) -> BadRequest:
    """By the field whose grammar is refused alone."""
    tools = await asyncio.to_thread(TOOLS.decode, guarantee.tools)
    try:
        async with asyncio.timeout(HTTP_SECONDS):
            found = await _refused_tool(compiler, guarantee, tools)
    except (TimeoutError, NotNow):
        found = None
    if found is None and guarantee.answer is None and len(tools) == 1:
        found = _tool_refused(ToolRefused(tools[0].name, schema_reason(reason)), tools)
    if found is not None:
        return found
    return BadRequest(f"{guarantee.param}: {reason}", guarantee.param)


async def _refused_tool(
    compiler: Compiler, guarantee: Guarantee, tools: list[Tool]
) -> BadRequest | None:
    """The first one's error. Raises NotNow."""
    kind, model = guarantee.choice, guarantee.model
    if kind is None or isinstance(model.format, NoFormat):
        return None
    alone = each_alone(model.format, tools, kind, model.ids)
    try:
        while (made := await asyncio.to_thread(next, alone, None)) is not None:
            tool, text = made
            try:
                with await compiler.compiled(Grammar("lark", text)):
                    pass
            except NotServed as refused:
                return _tool_refused(ToolRefused(tool.name, schema_reason(str(refused))), tools)
    except ToolRefused as refused:
        return _tool_refused(refused, tools)
    except GrammarTooLarge:
        pass  # then the error is that of all of them
    return None


def _tool_refused(refused: ToolRefused, tools: list[Tool]) -> BadRequest:
    at = next((at for at, tool in enumerate(tools) if tool.name == refused.tool), 0)
    param = f"tools[{at}].function.{refused.field}"
    return BadRequest(f"{param}: {refused}", param)
