"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens. Blocks and tools are read
one by one, because each kind has fields of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.chat import MAX_MESSAGES
from kvline_server.http.protocol.constraints import check_schema
from kvline_server.http.protocol.generation import MAX_ASKED, MAX_STOPS, StopText
from kvline_server.http.protocol.messages import CallId
from kvline_server.http.protocol.strict import WHOLE, CacheControl, Label, Strict, kind_of
from kvline_server.http.protocol.tools import MAX_TOOLS, ToolName
from kvline_server.http.validation import UnsupportedValue

MAX_BLOCKS = 1024
# How base64 of a file of each type begins.
BEGINS = {
    "image/jpeg": "/9j/",
    "image/png": "iVBORw0KGgo",
    "image/gif": "R0lGOD",
    "image/webp": "UklGR",
}

Blocks = str | Annotated[list[Any], Field(max_length=MAX_BLOCKS)]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None  # of an answer that had some


class ImageSource(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str  # images.url reads it

    @model_validator(mode="before")
    @classmethod
    def _itself(cls, value: Any) -> Any:
        if (kind := kind_of(value)) in ("url", "file"):
            why = "fetches nothing from addresses" if kind == "url" else "keeps no files"
            raise UnsupportedValue(
                f"type: {kind} is not supported here: this server {why}; send the image as base64"
            )
        return value

    @model_validator(mode="after")
    def _of_its_type(self) -> ImageSource:
        """As in Anthropic's API, which takes no image under the name of another type."""
        found = (kind for kind, start in BEGINS.items() if self.data.startswith(start))
        if (kind := next(found, self.media_type)) != self.media_type:
            raise ValueError(f"media_type: must be {kind}, as the data is, not {self.media_type}")
        return self


class ImageBlock(Strict):
    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Strict):
    """What another server had hidden; nothing here can read it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Blocks | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class AnthropicTool(Strict):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are sent as they are written


class AnthropicChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _one_name(self) -> AnthropicChoice:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name: with type tool, and with no other")
        return self


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_ASKED), WHOLE] | None = None
    display: Label | None = None

    @model_validator(mode="after")
    def _budget(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens: only with type enabled")
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    _bounded = field_validator("schema_")(check_schema)


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class UserOf(Strict):
    user_id: Label | None = None


class CountTokensRequest(Strict):
    ignored = neutral.ANTHROPIC

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None  # nothing is taken out of a context


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000), WHOLE] | None = None
    metadata: UserOf | None = None
