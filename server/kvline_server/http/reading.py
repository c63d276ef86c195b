"""What is read from the answers to a chat: calls and reasoning, as its model writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvline_server.formats.answer import AnswerParser
from kvline_server.formats.detect import NoFormat, in_reasoning
from kvline_server.formats.format import HARMONY, Body, Format
from kvline_server.formats.parser import Reads, parser
from kvline_server.formats.tools import MOST_SCHEMAS, Tool, listed_values, resolved, types
from kvline_server.http.answering import Answering, constrained, format_of_calls, only_calls
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.ipc.sampling_params import ThinkingBudget

MOST_FOLLOWED = 20_000  # parts of all schemas, for the types of parameters: 0.2 s at most
PER_PROPERTY = 400  # bytes of one, beside the texts of its name and values


@dataclass(frozen=True, slots=True)
class Reading:
    """Of all answers to a request; each has a parser of its own."""

    reads: Reads
    ids: Mapping[str, int]  # the tokenizer's added tokens by text
    one_call: bool = False  # the answer ends with its first call
    shows_reasoning: bool = True

    def parser(self) -> AnswerParser:
        return parser(self.reads, self.ids)

    @property
    def held(self) -> int:
        """Bytes that the tools take until the request is answered."""
        return sum(
            PER_PROPERTY + len(name) + len(str(schema))
            for tool in self.reads.tools
            for name, schema in tool.properties().items()
        )


def reading(request: ChatRequest, model: Answering, prompt: str) -> Reading | None:
    """Of a request whose messages are rendered as `prompt`; None where all that the model writes is
    text. Raises BadRequest where it has tools whose calls cannot be read."""
    format = None if isinstance(model.format, NoFormat) else model.format
    of_calls = format_of_calls(request, model)
    tools = () if of_calls is None else _tools(request, of_calls)
    if model.thinking is None and format is not HARMONY and not tools:
        return None
    begun = in_reasoning(model.thinking, prompt, request.continued())
    reads = Reads(format, tools, model.thinking, begun, constrained(request), only_calls(request))
    one_call = request.parallel_tool_calls is False
    return Reading(reads, model.ids, one_call, request.include_reasoning)


def _tools(request: ChatRequest, format: Format) -> tuple[Tool, ...]:
    """What is needed to read their calls, which is less than what they are: they are kept until
    the request is answered."""
    asked = [tool.function for tool in request.tools or ()]
    if all(opening.body is not Body.XML for opening in format.openings):
        return tuple(Tool(function.name, {}) for function in asked)
    given = [Tool(function.name, function.parameters or {}) for function in asked]
    most = MOST_FOLLOWED // max(1, sum(len(tool.properties()) for tool in given))
    most = min(most, MOST_SCHEMAS)
    return tuple(Tool(tool.name, _types(tool, most)) for tool in given)


def _types(tool: Tool, most: int) -> dict[str, object]:
    """The types of its parameters, whose values a model writes as text; of each by the first `most`
    parts of its schema."""
    root = tool.parameters
    properties = {}
    for name, schema in tool.properties().items():
        found: dict[str, object] = {"type": sorted(types(schema, root, most))}
        listed = listed_values(resolved(schema, root))
        properties[name] = found if listed is None else found | {"enum": listed}
    return {"properties": properties}


def takes_budget(model: Answering) -> bool:
    """Whether the marks of its reasoning are tokens, by which a budget ends it."""
    thinking = model.thinking
    return thinking is not None and {thinking.open, thinking.close} <= model.ids.keys()


def budget(request: ChatRequest, model: Answering, made: Reading | None) -> ThinkingBudget | None:
    """Raises BadRequest where nothing of the model's would end its reasoning."""
    tokens, thinking = request.thinking_token_budget, model.thinking
    if tokens is None:
        return None
    if thinking is None or not takes_budget(model):
        raise BadRequest(
            "thinking_token_budget: this model's tokenizer has no tokens around its reasoning, so "
            "no budget can end it; leave it out",
            "thinking_token_budget",
            "unsupported_value",
        )
    begun = made is not None and made.reads.in_reasoning
    begin = None if begun else model.ids[thinking.open]
    return ThinkingBudget(tokens, model.ids[thinking.close], begin)
