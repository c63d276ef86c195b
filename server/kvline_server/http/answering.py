"""How a model writes its answers: its format of calls and its marks of reasoning, found once; and
which requests need a grammar for their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvline_contract.launch import ToolCallParser
from kvline_server.formats.detect import NoFormat, detect, detect_thinking
from kvline_server.formats.format import FORMATS, Format, Thinking
from kvline_server.formats.grammar import Choice
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.tools import NamedTool


@dataclass(frozen=True, slots=True)
class Answering:
    format: Format | NoFormat = NoFormat.TAKES_NONE  # of calls, or why there are none
    thinking: Thinking | None = None
    ids: Mapping[str, int] = field(default_factory=dict)  # the tokenizer's added tokens by text


def answering(
    template: str, ids: Mapping[str, int], parser: ToolCallParser | None = None
) -> Answering:
    """Of a model with this chat template for tools; `parser` overrules what that
    shows."""
    format = FORMATS[parser] if parser is not None else detect(template, ids)
    return Answering(format, detect_thinking(template, ids), ids)


def format_of_calls(request: ChatRequest, model: Answering) -> Format | None:
    """Of those that an answer may have; None where it may have none. Raises BadRequest where the
    request has tools, and no parser reads their calls."""
    if not request.may_call():
        return None
    if isinstance(model.format, NoFormat):
        raise BadRequest(f"tools: {model.format}", "tools", "unsupported_value")
    return model.format


def choice(request: ChatRequest) -> Choice | None:
    """Of its calls, where they are guaranteed, which needs a grammar."""
    if not request.may_call():
        return None
    if isinstance(request.tool_choice, NamedTool):
        return Choice("named", request.tool_choice.function.name)
    if request.tool_choice == "required":
        return Choice("required")
    strict = any(tool.function.strict for tool in request.tools or ())
    return Choice("auto") if strict else None


def only_calls(request: ChatRequest) -> bool:
    """Whether its answers have no text."""
    kind = choice(request)
    return kind is not None and kind.kind != "auto"


def constrained(request: ChatRequest) -> bool:
    """Whether a grammar says which calls and which text its answers may have."""
    form = request.response_format
    formed = form is not None and form.type != "text"
    return formed or request.structured_outputs is not None or choice(request) is not None
