"""Errors of the API, in OpenAI's format, at most 1 KB. Clients branch on `code`: it is OpenAI's
where OpenAI has one, and null where it has none.

ApiError
├── BadRequest     400  names the field
│   └── NotRendered     by a chat template
├── Unauthorized   401
├── NotFound       404
├── NotAllowed     405
├── TimedOut       408
│   └── NotRead    only as an event of a stream
├── TooLarge       413
├── UnsupportedType 415
├── TooMany        429  with Retry-After
├── HeadTooLarge   431
├── EngineFailed   500
├── GrammarFailed  503  with Retry-After
├── Unavailable    503
└── NoGrammar      503  with Retry-After
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from starlette.responses import JSONResponse


class ApiError(Exception):
    status = 500
    type = "server_error"
    usual_code: ClassVar[str | None] = None
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message[:700]
        self.param = param[:100] if param else None
        self.code = code or self.usual_code

    @property
    def shown(self) -> str:
        """The message. Clients shorten their history where it has the words for a long prompt:
        LangChain no longer sees the code, and Anthropic's errors have none."""
        too_long = self.code == "context_length_exceeded"
        return f"prompt is too long: {self.message}" if too_long else self.message

    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.shown,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code or ("invalid_value" if param else None))


class NotRendered(BadRequest):
    """A chat template failed, or left out what it was given."""


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer", "Connection": "close"}


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class NotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    usual_code = "method_not_supported"


class TimedOut(ApiError):
    """The client did not send its request in time."""

    status = 408
    type = "invalid_request_error"
    headers: ClassVar[Mapping[str, str]] = {"Connection": "close"}


class NotRead(TimedOut):
    """The client did not read its answer in time."""


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    headers: ClassVar[Mapping[str, str]] = {"Connection": "close"}


class HeadTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"


class UnsupportedType(ApiError):
    status = 415
    type = "invalid_request_error"
    usual_code = "unsupported_content_type"


class TooMany(ApiError):
    status = 429
    type = "rate_limit_error"
    usual_code = "rate_limit_exceeded"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}

    def __init__(self, message: str, sequences: int = 1) -> None:
        """`sequences`: how many were asked for, where that is known."""
        super().__init__(message)
        self.sequences = sequences


class EngineFailed(ApiError):
    status = 500


class GrammarFailed(ApiError):
    """An answer's grammar could not be followed to its end. Another try may be."""

    status = 503
    usual_code = "grammar_failed"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class Unavailable(ApiError):
    status = 503
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "5", "Connection": "close"}


class NoGrammar(ApiError):
    """What the answer must follow could not be compiled now."""

    status = 503
    usual_code = "grammar_unavailable"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}
