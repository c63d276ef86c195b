"""From /v1/responses to the chat request that means the same: pure, from models to a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvline_server.http.content import Content
from kvline_server.http.errors import BadRequest
from kvline_server.http.fields import Fields, named
from kvline_server.http.protocol import responses as kinds
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.strict import kind_of, parse, parse_at
from kvline_server.http.protocol.tools import check_left_out

Object = dict[str, Any]
Names = dict[str, tuple[str, str]]  # what a model calls -> its namespace, and its name in that
# What a model may do without: clients send them with their own tools to every server.
LEFT_OUT = ("web_search", "web_search_preview")
# As the chat has them, by the same names.
SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "store"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"),
    "client_metadata",
)


# The chat's fields, by which errors name what came from these.
FIELDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


def to_chat(request: ResponsesRequest) -> tuple[ChatRequest, Names, Fields]:
    """Raises BadRequest with the place of what is wrong."""
    made: Object = {name: getattr(request, name) for name in SAME}
    made["max_completion_tokens"] = request.max_output_tokens
    names: Names = {}
    tools = list(_tools(request.tools or [], "tools", names))
    made["tools"] = [tool for _, tool in tools]
    made["messages"], items = _messages(request, names)
    fields = Fields(FIELDS, "parameters", [place for place, _ in tools], items)
    if isinstance(request.tool_choice, kinds.NamedFunction):
        made["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    else:
        made["tool_choice"] = request.tool_choice
    if request.reasoning is not None:
        made["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        made["response_format"] = _format(request.text.format)
    # OpenAI answers a number alone with an empty list, which nobody can have meant.
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        made |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    with named(fields.of):
        return parse(ChatRequest, made), names, fields


def _format(given: kinds.TextFormat) -> Object:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name, "schema": given.schema_, "strict": given.strict}
    described = {} if given.description is None else {"description": given.description}
    return {"type": "json_schema", "json_schema": schema | described}


def _tools(
    given: list[Any], place: str, names: Names, namespace: str = ""
) -> Iterator[tuple[str, Object]]:
    """Each with its place."""
    for index, tool in enumerate(given):
        at = f"{place}[{index}]"
        kind = kind_of(tool)
        if kind == "namespace" and not namespace:
            group = parse_at(kinds.NamespaceTool, tool, at)
            yield from _tools(group.tools, f"{at}.tools", names, group.name)
        elif kind in LEFT_OUT and not namespace:
            check_left_out(tool, at)
        else:
            if kind not in (None, "function"):
                what = "must be function; no other tools are supported here"
                raise _unsupported(f"{at}.type", what)
            yield at, _function(parse_at(kinds.FunctionTool, tool, at), namespace, names)


def _function(tool: kinds.FunctionTool, namespace: str, names: Names) -> Object:
    name = _called(namespace, tool.name)
    if namespace:
        names[name] = namespace, tool.name
    function = {"description": tool.description, "parameters": tool.parameters}
    return {
        "type": "function",
        "function": {"name": name, "strict": tool.strict, **function},
    }


def _called(namespace: str | None, name: str) -> str:
    """What a model calls a function of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}.{name}"


def _messages(request: ResponsesRequest, names: Names) -> tuple[list[Object], dict[str, str]]:
    """-> the chat's messages; which item each, and each call in one, comes from"""
    made = _Messages()
    if request.instructions:
        made.add("system", Content(request.instructions), "instructions")
    if isinstance(request.input, str):
        made.add("user", Content(request.input), "input")
    else:
        for index, item in enumerate(request.input):
            _item(made, item, f"input[{index}]")
    return made.whole(), made.items


def _item(made: _Messages, item: Any, at: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        message = parse_at(kinds.MessageItem, item, at)
        content = _content(message.content, f"{at}.content", images=message.role == "user")
        if message.role == "assistant":
            made.wrote(content, at)
        else:
            made.add("user" if message.role == "user" else "system", content, at)
    elif kind == "function_call":
        call = parse_at(kinds.FunctionCall, item, at)
        function = {"name": _called(call.namespace, call.name), "arguments": call.arguments}
        made.called({"id": call.call_id, "type": "function", "function": function}, at)
    elif kind == "function_call_output":
        result = parse_at(kinds.FunctionCallOutput, item, at)
        made.result(result.call_id, _content(result.output, f"{at}.output", images=True), at)
    elif kind == "reasoning":
        thought = parse_at(kinds.ReasoningItem, item, at)
        made.thought("".join(part.text for part in thought.content or thought.summary), at)
    else:
        raise _unsupported(f"{at}.type", "this kind of item is not supported here")


def _content(content: str | list[Any], at: str, *, images: bool) -> Content:
    """`images`: whether it may have some."""
    if isinstance(content, str):
        return Content(content)
    made = Content()
    for index, part in enumerate(content):
        place = f"{at}[{index}]"
        kind = kind_of(part)
        if kind == "input_image" and images:
            image = parse_at(kinds.InputImage, part, place)
            detail = "high" if image.detail == "original" else image.detail
            made.image(image.image_url, f"{place}.image_url", detail)
        elif kind == "input_image":
            what = "only a user's message and a function's output have images"
            raise _unsupported(f"{place}.type", what)
        elif kind and kind.startswith(("input_", "computer_")) and kind != "input_text":
            what = f"{kind[:40]} is not supported here; only text and input_image parts are taken"
            raise _unsupported(f"{place}.type", what)
        elif kind == "refusal":
            made.text(parse_at(kinds.RefusalPart, part, place).refusal)
        else:
            made.text(parse_at(kinds.Part, part, place).text)
    return made


def _unsupported(place: str, what: str) -> BadRequest:
    return BadRequest(f"{place}: {what}", place, "unsupported_value")


class _Messages:
    """Gathers items: what an assistant thought, wrote and called is one message of a chat. Texts
    that many items give are joined once, at the end."""

    def __init__(self) -> None:
        self._all: list[Object] = []
        self.items: dict[str, str] = {}  # where each message began, each call and image in one
        self._system = True  # there are no other messages yet

    def add(self, role: str, content: Content, at: str) -> None:
        """System texts at the start are one message: templates have one place for it."""
        if role == "system" and self._system and self._all:
            self._all[-1]["content"].text("\n\n")
            self._all[-1]["content"].extend(content)
        else:
            self._system &= role == "system"
            self._append({"role": role, "content": content}, at)

    def wrote(self, content: Content, at: str) -> None:
        self._answer(at, "tool_calls").setdefault("content", Content()).extend(content)

    def thought(self, text: str, at: str) -> None:
        if text:
            self._answer(at, "tool_calls", "content").setdefault("reasoning", []).append(text)

    def called(self, call: Object, at: str) -> None:
        calls = self._answer(at).setdefault("tool_calls", [])
        self.items[f"messages[{len(self._all) - 1}].tool_calls[{len(calls)}]"] = at
        calls.append(call)

    def result(self, id: str, content: Content, at: str) -> None:
        self._system = False
        self._append({"role": "tool", "tool_call_id": id, "content": content}, at)

    def whole(self) -> list[Object]:
        for index, message in enumerate(self._all):
            if (content := message.get("content")) is not None:
                message["content"], images = content.whole()
                self.items |= {f"messages[{index}]{part}": at for part, at in images.items()}
            if "reasoning" in message:
                message["reasoning"] = "".join(message["reasoning"])
        return self._all

    def _append(self, message: Object, at: str) -> None:
        self.items[f"messages[{len(self._all)}]"] = at
        self._all.append(message)

    def _answer(self, at: str, *without: str) -> Object:
        """The assistant's message that goes on; another where this one has one of those parts."""
        last = self._all[-1] if self._all else {}
        if last.get("role") != "assistant" or any(last.get(part) for part in without):
            self._system = False
            self._append({"role": "assistant"}, at)
        return self._all[-1]
