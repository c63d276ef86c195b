"""The body of /v1/chat/completions, and what of it makes a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.generation import (
    MAX_ASKED,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
)
from kvline_server.http.protocol.messages import ChatMessage
from kvline_server.http.protocol.strict import MAX_DEPTH, WHOLE, Strict, check_depth
from kvline_server.http.protocol.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice, check_tools
from kvline_server.http.template_files import RESERVED

MAX_MESSAGES = 4096  # of a long run of an agent
MAX_DOCUMENTS, MAX_VARIABLES = 256, 64

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Strict):
    """What the chat template gets."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    reasoning_effort: Effort | None = None

    @field_validator("chat_template_kwargs", "documents")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        check_depth(value, MAX_DEPTH)
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(RESERVED.intersection(value or ()))
        if taken:
            raise ValueError(f"{taken[0]!r} is not a variable that a request may set")
        return value

    @field_validator("tools")
    @classmethod
    def _bounded(cls, value: list[Tool] | None) -> list[Tool] | None:
        check_tools(value or [])
        return value

    @model_validator(mode="after")
    def _one_effort(self) -> Self:
        other = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort is not None and other != self.reasoning_effort:
            raise ValueError("reasoning_effort: not together with another in chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt: not together with continue_final_message")
        if self.continue_final_message and not isinstance(self.messages[-1].shown(), str):
            raise ValueError("continue_final_message: not of a message with images")
        return self

    def generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def continued(self) -> str:
        """The text that an answer goes on with; empty where it begins a message."""
        return self.messages[-1].text() if self.continue_final_message else ""

    def variables(self) -> dict[str, Any]:
        """What the chat template gets of the request's own names. `enable_thinking` is what
        templates have that know no effort."""
        if self.reasoning_effort is None:
            return dict(self.chat_template_kwargs or {})
        effort: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return effort | (self.chat_template_kwargs or {})


class ChatRequest(Conversation, GenerationRequest):
    ignored = neutral.CHAT
    prompt_field = "messages"

    max_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True  # in the answer
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_ASKED), WHOLE] | None = None

    def may_call(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _known_tool(self) -> ChatRequest:
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice.function.name: is none of the tools")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self
