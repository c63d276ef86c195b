"""Fields that completions and chat share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.constraints import ResponseFormat, StructuredOutputs
from kvline_server.http.protocol.strict import WHOLE, Label, Labels, Strict
from kvline_server.ipc.sampling_params import MAX_BIASES

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_ASKED = 2**53  # output tokens: the largest integer of JavaScript; the context leaves fewer

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
ClientMetadata = Annotated[
    dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=8192)]],
    Field(max_length=64),
]


class StreamOptions(Strict):
    ignored = neutral.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """Fields of both completions and chat."""

    prompt_field: ClassVar[str]

    model: Annotated[str, Field(max_length=512)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_ASKED), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_ASKED), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000), WHOLE] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    store: bool | None = None
    metadata: Labels | None = None
    client_metadata: ClientMetadata | None = None
    cache_salt: Salt | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_ASKED), WHOLE] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    prompt_logprobs_format: Literal["json", "base64"] = "json"

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not key.isascii() or not key.isdigit() or len(key) > 9:
                raise ValueError("keys must be token ids")
        return value

    @field_validator("seed")
    @classmethod
    def _no_sign(cls, value: int | None) -> int | None:
        """-1 is none, as for vLLM; the engine's seeds have 63 bits."""
        return None if value in (None, -1) else value & (2**63 - 1)

    @field_validator("stop", mode="before")
    @classmethod
    def _no_stop(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _one_length(self) -> GenerationRequest:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens: not together with another max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _streaming(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream")
        if self.prompt_logprobs is None and self.prompt_logprobs_format != "json":
            raise ValueError("prompt_logprobs_format: only with prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _no_early_end(self) -> GenerationRequest:
        if self.min_tokens and (not self.ignore_eos or self.stop):
            raise ValueError("min_tokens: only 0, or with ignore_eos and without stop")
        return self

    def most(self) -> int | None:
        """Output tokens that are asked for, by either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
