"""What a valid request asks for and this server does not do: the one place that says so."""

from __future__ import annotations

from kvline_server.http.answering import choice
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.generation import GenerationRequest


def check_served(request: GenerationRequest) -> None:
    """Raises BadRequest by the field's name: answers are not constrained, nor are calls."""
    if request.response_format is not None and request.response_format.type != "text":
        raise _unserved("response_format.type", 'leave it out, or send "text"')
    if request.structured_outputs is not None:
        raise _unserved("structured_outputs", "leave it out")
    if not isinstance(request, ChatRequest):
        return
    if request.tool_choice not in (None, "none", "auto"):
        raise _unserved("tool_choice", 'leave it out, or send "none"')
    if choice(request) is not None:
        raise _unserved("tools", 'leave "strict" out, or send tool_choice "none"')


def _unserved(field: str, instead: str) -> BadRequest:
    return BadRequest(f"{field}: is not supported here; {instead}", field, "unsupported_value")
