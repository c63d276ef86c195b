"""The bodies of /tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.chat import Conversation
from kvline_server.http.protocol.completions import MAX_PROMPT_IDS, token_ids
from kvline_server.http.protocol.strict import Strict

ModelName = Annotated[str, Field(max_length=512)]


class TokenizeText(Strict):
    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    ignored = neutral.TOKENIZE_CHAT

    model: ModelName | None = None
    return_token_strs: bool = False


class Detokenize(Strict):
    model: ModelName | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_PROMPT_IDS)]

    @field_validator("tokens", mode="before")
    @classmethod
    def _ids(cls, value: object) -> list[int]:
        return token_ids(value)
