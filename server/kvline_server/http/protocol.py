"""Request models: strict types, both bounds on every number, unknown fields rejected.

Every accepted field has its effect. Ignored are only labels such as `user`, which by OpenAI's
definition change no answer, nulls, and the values that neutral.py lists.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvline_server.http import neutral
from kvline_server.http.template_files import RESERVED
from kvline_server.http.validation import EmptyArray, UnsupportedValue, bad_request
from kvline_server.ipc.sampling_params import MAX_BIASES
from kvline_server.options.clients import MAX_PROMPTS

MAX_CHOICES = 8
MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_PROMPT_IDS = 1 << 20
MAX_DOCUMENTS, MAX_VARIABLES = 256, 64
MAX_DEPTH = 32  # of lists and objects in each other, in what a template gets as it is
OTHER_ROLES = ("tool", "function")
OTHER_PARTS = {"image_url", "input_audio", "file", "refusal", "video_url", "audio_url"}

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Salt = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Label],
    Field(max_length=16),
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[neutral.Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, value: Any) -> Any:
        return neutral.without(value, cls.ignored) if isinstance(value, dict) else value


class StreamOptions(Strict):
    ignored = neutral.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict):
    """Fields of both completions and chat."""

    prompt_field: ClassVar[str]

    model: Annotated[str, Field(max_length=512)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    cache_salt: Salt | None = None
    metadata: Metadata | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs_format: Literal["json", "base64"] = "json"

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not key.isascii() or not key.isdigit() or len(key) > 9:
                raise ValueError("keys must be token ids")
        return value

    @model_validator(mode="after")
    def _one_length(self) -> GenerationRequest:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens: not together with another max_completion_tokens")
        return self

    @model_validator(mode="after")
    def _streaming(self) -> GenerationRequest:
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise ValueError("stream_options: only with stream")
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

    def length_field(self) -> str:
        """What to make shorter where prompt and output exceed the context together."""
        if self.most() is None:
            return self.prompt_field
        return "max_completion_tokens" if self.max_tokens is None else "max_tokens"

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(GenerationRequest):
    ignored = neutral.COMPLETION
    prompt_field = "prompt"

    prompt: Any  # text, token ids, or a list of either; see _prompt
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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
        for token in item:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError("token ids must be non-negative integers")
        return item

    @model_validator(mode="after")
    def _nothing_to_do(self) -> CompletionRequest:
        if self.most() == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError(f"{self.length_field()}: 0 only with echo or prompt_logprobs")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: must equal n")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str

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


class ChatRequest(GenerationRequest):
    ignored = neutral.CHAT
    prompt_field = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None

    @field_validator("chat_template_kwargs", "documents")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        if _deeper(value, MAX_DEPTH):
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


R = TypeVar("R", bound=GenerationRequest)


def parse(kind: type[R], value: dict[str, Any]) -> R:
    """Validates a request. Raises BadRequest with the first wrong field's name, not its value."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(kind, error) from None


def _deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_deeper(item, depth - 1) for item in inner)
