"""Errors in the form that the clients of a route read: OpenAI's, or Anthropic's."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from kvline_server.http.errors import ApiError

ANTHROPIC = "/v1/messages"  # and below
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def response(error: ApiError, path: str) -> JSONResponse:
    if path != ANTHROPIC and not path.startswith(f"{ANTHROPIC}/"):
        return error.response()
    return JSONResponse(anthropic_body(error), error.status, error.headers)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": TYPES.get(error.status, kind), "message": error.shown},
    }
