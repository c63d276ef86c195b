"""From Anthropic's /v1/messages to the chat request that means the same: pure, from models to a
model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvline_server.http.content import Content
from kvline_server.http.errors import BadRequest
from kvline_server.http.fields import Fields, named
from kvline_server.http.protocol import anthropic as kinds
from kvline_server.http.protocol.anthropic import CountTokensRequest, MessagesRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import kind_of, parse, parse_at
from kvline_server.http.protocol.tools import check_left_out

Object = dict[str, Any]
# A message with its place, and those of its calls and images by where they are in it.
Placed = tuple[str, Object, dict[str, str]]
# Begins a text that Claude Code puts first, and that differs in each request: with it no prompt
# would be in the prefix cache.
BILLING = "x-anthropic-billing-header"
LEFT_OUT = "web_search"  # what a model may do without; clients send it to every server
FAILED = "Error"  # begins the result of a call that failed
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# The chat's fields, by which errors name what came from these.
FIELDS = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "messages": "messages",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tool_choice.function": "tool_choice",
}


def to_chat(request: CountTokensRequest) -> tuple[ChatRequest, Fields]:
    """Raises BadRequest with the place of what is wrong."""
    messages = list(_messages(request))
    made: Object = {"model": request.model, "messages": [message for _, message, _ in messages]}
    tools = list(_tools(request.tools or []))
    made["tools"] = [tool for _, tool in tools]
    items = _items(messages)
    fields = Fields(FIELDS, "input_schema", [place for place, _ in tools], items)
    made |= _choice(request.tool_choice) | _thinking(request)
    last = made["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        made["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        made |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "user": request.metadata and request.metadata.user_id,
        }
    with named(fields.of):
        return parse(ChatRequest, made), fields


def _choice(given: kinds.AnthropicChoice | None) -> Object:
    if given is None:
        return {}
    named = {"type": "function", "function": {"name": given.name}}
    choice = {"tool_choice": CHOICES.get(given.type, named)}
    return choice | ({"parallel_tool_calls": False} if given.disable_parallel_tool_use else {})


def _thinking(request: CountTokensRequest) -> Object:
    """A client that does not ask for thinking gets none of it, whether the model thinks or not."""
    made: Object = {"include_reasoning": False}
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        made["include_reasoning"] = thinks
        made["chat_template_kwargs"] = {"enable_thinking": thinks}
        made["thinking_token_budget"] = request.thinking.budget_tokens
    if request.output_config is not None:
        made["reasoning_effort"] = request.output_config.effort
        if request.output_config.format is not None:
            schema = {"name": "answer", "schema": request.output_config.format.schema_}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


def _tools(given: list[Any]) -> Iterator[tuple[str, Object]]:
    """Each with its place."""
    for index, tool in enumerate(given):
        at = f"tools[{index}]"
        kind = kind_of(tool)
        if kind is not None and kind.startswith(LEFT_OUT):
            check_left_out(tool, at)
            continue
        if kind not in (None, "custom"):
            raise _unsupported(f"{at}.type", "must be custom; no other tools are supported here")
        read = parse_at(kinds.AnthropicTool, tool, at)
        function = {"name": read.name, "parameters": read.input_schema, "strict": read.strict}
        function |= {"description": read.description}
        yield at, {"type": "function", "function": function}


def _items(messages: list[Placed]) -> dict[str, str]:
    """Their places by the chat's."""
    items = {}
    for index, (at, _, parts) in enumerate(messages):
        items[f"messages[{index}]"] = at
        items |= {f"messages[{index}]{part}": place for part, place in parts.items()}
    return items


def _messages(request: CountTokensRequest) -> Iterator[Placed]:
    if request.system is not None:
        first, *others = list(_texts(request.system, "system")) or [""]
        if first.startswith(BILLING):
            first = first.partition("\n")[2]
        system = "\n\n".join(text for text in (first, *others) if text)
        if system:
            yield "system", {"role": "system", "content": system}, {}
    for index, given in enumerate(request.messages):
        at = f"messages[{index}]"
        message = parse_at(kinds.AnthropicMessage, given, at)
        if isinstance(message.content, str):
            yield at, {"role": message.role, "content": message.content}, {}
        elif message.role == "system":
            text = "".join(_texts(message.content, f"{at}.content"))
            yield at, {"role": "system", "content": text}, {}
        elif message.role == "user":
            yield from _of_user(message.content, at)
        else:
            yield _of_assistant(message.content, at)


def _of_user(blocks: list[Any], at: str) -> Iterator[Placed]:
    """Results of tools are messages of their own."""
    written: Content | None = None if blocks else Content()
    for index, block in enumerate(blocks):
        place = f"{at}.content[{index}]"
        if kind_of(block) == "tool_result":
            if written is not None:
                yield _placed(at, {"role": "user"}, written)
                written = None
            read = parse_at(kinds.ToolResultBlock, block, place)
            result = {"role": "tool", "tool_call_id": read.tool_use_id}
            yield _placed(place, result, _result(read, f"{place}.content"))
        else:
            if written is None:
                written = Content()
            _add(written, block, place)
    if written is not None:
        yield _placed(at, {"role": "user"}, written)


def _result(block: kinds.ToolResultBlock, at: str) -> Content:
    made, content = Content(), block.content or ""
    if isinstance(content, str):
        made.text(content)
    else:
        for index, each in enumerate(content):
            _add(made, each, f"{at}[{index}]")
    if block.is_error:  # no template has a place for it
        made.begin(f"{FAILED}: " if made else FAILED)
    return made


def _add(content: Content, block: Any, at: str) -> None:
    if kind_of(block) == "image":
        source = parse_at(kinds.ImageBlock, block, at).source
        content.image(f"data:{source.media_type};base64,{source.data}", f"{at}.source")
    else:
        content.text(_text(block, at))


def _placed(at: str, message: Object, content: Content) -> Placed:
    whole, images = content.whole()
    return at, message | {"content": whole}, images


def _of_assistant(blocks: list[Any], at: str) -> Placed:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    places: dict[str, str] = {}
    for index, block in enumerate(blocks):
        place = f"{at}.content[{index}]"
        kind = kind_of(block)
        if kind == "tool_use":
            places[f".tool_calls[{len(calls)}]"] = place
            calls.append(_call(parse_at(kinds.ToolUseBlock, block, place)))
        elif kind == "thinking":
            thoughts.append(parse_at(kinds.ThinkingBlock, block, place).thinking)
        elif kind == "redacted_thinking":
            parse_at(kinds.RedactedBlock, block, place)
        else:
            texts.append(_text(block, place))
    made: Object = {"role": "assistant", "content": "".join(texts)}
    made |= {"reasoning": "".join(thoughts) or None} | ({"tool_calls": calls} if calls else {})
    return at, made, places


def _call(block: kinds.ToolUseBlock) -> Object:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _texts(content: str | list[Any], at: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        for index, block in enumerate(content):
            yield _text(block, f"{at}[{index}]")


def _text(block: Any, at: str) -> str:
    kind = kind_of(block)
    if kind is not None and kind != "text":
        raise _unsupported(f"{at}.type", f"{kind[:40]} is not supported here, text is")
    return parse_at(kinds.TextBlock, block, at).text


def _unsupported(place: str, what: str) -> BadRequest:
    return BadRequest(f"{place}: {what}", place, "unsupported_value")
