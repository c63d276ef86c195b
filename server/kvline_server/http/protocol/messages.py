"""The messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.strict import WHOLE, CacheControl, Strict, kind_of
from kvline_server.http.validation import UnsupportedValue

MAX_CALLS, MAX_PARTS = 128, 1024  # of one message
OTHER_PARTS = {"input_audio", "file", "refusal", "video_url", "audio_url"}

Name = Annotated[str, Field(max_length=128)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        """Before its fields, of which each kind of part has others."""
        if (kind := kind_of(value)) not in (None, "text"):
            what = kind if kind in OTHER_PARTS else "this kind of part"
            taken = "only text and image_url parts are taken"
            raise UnsupportedValue(f"type: {what} is not supported here; {taken}")
        return value


class ImageUrl(Strict):
    url: str  # images.url reads it
    detail: Literal["low", "high", "auto"] = "auto"


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheControl | None = None


def _part(value: Any) -> str:
    return IMAGE if kind_of(value) == "image_url" or isinstance(value, ImagePart) else TEXT


TEXT, IMAGE = "[text]", "[image_url]"  # of a union's arms, which errors do not name
Part = Annotated[
    Annotated[TextPart, Tag(TEXT)] | Annotated[ImagePart, Tag(IMAGE)], Discriminator(_part)
]


class CalledFunction(Strict):
    """As a model wrote it: the name may be that of no tool."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str  # JSON; conversation.py reads it
    parsed_arguments: Any = None  # OpenAI's client keeps what it read


class ToolCall(Strict):
    ignored = neutral.TOOL_CALL

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_CALLS), WHOLE] | None = None  # as in a stream


class ChatMessage(Strict):
    ignored = neutral.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # OpenAI's client keeps what it read
    cache_control: CacheControl | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_functions(cls, value: Any) -> Any:
        if value == "function":
            raise UnsupportedValue("function is not supported here; send a tool's result as tool")
        return value

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: only an assistant's may be null")
        return self

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name}: only an assistant's message has it")
        if self.role not in ("user", "tool") and (at := self._first_image()) is not None:
            wrong = (
                f"only messages of a user or a tool have images, and this is of role {self.role}"
            )
            raise UnsupportedValue(f"content[{at}].image_url: {wrong}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id: a tool's message has it, and no other")
        if self.reasoning and self.reasoning_content not in (None, "", self.reasoning):
            raise ValueError("reasoning: not together with another reasoning_content")
        return self

    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def shown(self) -> str | list[dict[str, str]]:
        """What a chat template gets: a text, or in their order the parts of one with images."""
        if not isinstance(self.content, list) or self._first_image() is None:
            return self.text()
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]

    def _first_image(self) -> int | None:
        """Its place among the parts."""
        parts = self.content if isinstance(self.content, list) else ()
        return next((at for at, part in enumerate(parts) if isinstance(part, ImagePart)), None)

    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""
