"""What a valid request asks for and this server does not do: the one place that says so."""

from __future__ import annotations

from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.generation import GenerationRequest


def check_served(request: GenerationRequest) -> None:
    """Raises BadRequest by the field's name."""
    if isinstance(request, ChatRequest) and request.thinking_token_budget is not None:
        field = "thinking_token_budget"
        message = f"{field}: is not supported here; leave it out"
        raise BadRequest(message, field, "unsupported_value")
