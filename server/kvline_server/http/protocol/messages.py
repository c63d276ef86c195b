"""The messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.strict import CacheControl, Strict
from kvline_server.http.validation import UnsupportedValue

OTHER_ROLES = ("tool", "function")
OTHER_PARTS = {"image_url", "input_audio", "file", "refusal", "video_url", "audio_url"}


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        """Before its fields, of which each kind of part has others."""
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            what = kind if kind in OTHER_PARTS else "this kind of part"
            raise UnsupportedValue(f"type: {what} is not supported here; only text parts are taken")
        return value


class ChatMessage(Strict):
    ignored = neutral.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=64)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value in OTHER_ROLES:
            raise UnsupportedValue(f"{value} is not supported here; there are no tools")
        return value

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: only an assistant's may be null")
        return self

    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def rendered(self) -> dict[str, str]:
        """The message as the chat template gets it."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.text(), **named}
