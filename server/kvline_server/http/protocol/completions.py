"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.generation import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
)
from kvline_server.http.protocol.strict import WHOLE
from kvline_server.http.validation import EmptyArray
from kvline_server.options.clients import MAX_PROMPTS

MAX_PROMPT_IDS = 1 << 20


def token_ids(value: Any) -> list[int]:
    """Raises ValueError. Without pydantic, which takes longer for each of a million."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError("token ids must be non-negative integers")
    return value


class CompletionRequest(GenerationRequest):
    ignored = neutral.COMPLETION
    prompt_field = "prompt"

    prompt: Any  # text, token ids, or a list of either; see _prompt
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if value == []:
            raise EmptyArray("must not be empty")
        if not isinstance(value, list):
            raise ValueError("must be text, token ids, or a list of either")
        if all(isinstance(item, int) for item in value):
            value = [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts")
        return [cls._one_prompt(item) for item in value]

    @staticmethod
    def _one_prompt(item: Any) -> str | list[int]:
        if isinstance(item, str):
            return item
        if not isinstance(item, list) or len(item) > MAX_PROMPT_IDS:
            raise ValueError("must be text, token ids, or a list of either")
        return token_ids(item)

    @model_validator(mode="after")
    def _nothing_to_do(self) -> CompletionRequest:
        if self.most() == 0 and not self.echo and self.prompt_logprobs is None:
            field = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
            raise ValueError(f"{field}: 0 only with echo or prompt_logprobs")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: must equal n")
        return self
