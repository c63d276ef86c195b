"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.generation import (
    MAX_ASKED,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
)
from kvline_server.http.protocol.messages import ChatMessage
from kvline_server.http.protocol.strict import MAX_DEPTH, WHOLE, deeper
from kvline_server.http.template_files import RESERVED

MAX_MESSAGES = 1024
MAX_DOCUMENTS, MAX_VARIABLES = 256, 64


class ChatRequest(GenerationRequest):
    ignored = neutral.CHAT
    prompt_field = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None

    @field_validator("chat_template_kwargs", "documents")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        if deeper(value, MAX_DEPTH):
            raise ValueError(f"lists and objects are in each other more than {MAX_DEPTH} deep")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(RESERVED.intersection(value or ()))
        if taken:
            raise ValueError(f"{taken[0]!r} is not a variable that a request may set")
        return value

    @model_validator(mode="after")
    def _one_end(self) -> ChatRequest:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt: not together with continue_final_message")
        return self

    def generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self
