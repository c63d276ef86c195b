"""The body of /v1/responses. What its input and its tools hold is read item by item, because each
kind has fields of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvline_server.http import neutral
from kvline_server.http.protocol.chat import Effort
from kvline_server.http.protocol.constraints import check_schema
from kvline_server.http.protocol.generation import MAX_ASKED, MAX_TOP_LOGPROBS, ClientMetadata
from kvline_server.http.protocol.messages import CallId
from kvline_server.http.protocol.strict import WHOLE, Label, Labels, Strict
from kvline_server.http.protocol.tools import MAX_TOOLS, ToolName
from kvline_server.http.validation import UnsupportedValue

MAX_ITEMS = 8192
# Each asks for what another request or another server would have to keep.
KEPT = ("previous_response_id", "conversation", "prompt")

Status = Literal["in_progress", "completed", "incomplete"]
Included = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # Of tools that are not here, so these ask for nothing.
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("schema: json_schema has a name and a schema")
        check_schema(self.schema_)
        return self


class TextOptions(Strict):
    ignored = {"verbosity": ("medium",)}  # noqa: RUF012 - a class variable of Strict

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """Reasoning is given as it is written, so what its summaries are like changes nothing."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    ignored = neutral.STREAM_OPTIONS


class NamedFunction(Strict):
    type: Literal["function"]
    name: ToolName


class ResponsesRequest(Strict):
    ignored = neutral.RESPONSES

    model: Annotated[str, Field(max_length=512)]
    input: str | Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_ASKED), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], Field(max_length=16)] | None = None
    store: bool | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    metadata: Labels | None = None
    client_metadata: ClientMetadata | None = None

    @model_validator(mode="before")
    @classmethod
    def _stateless(cls, value: Any) -> Any:
        for name in KEPT:
            if isinstance(value, dict) and value.get(name) is not None:
                raise UnsupportedValue(
                    f"{name}: this server keeps no earlier requests; send all of it as input"
                )
        return value


class Part(Strict):
    """Of a message; `annotations` and `logprobs` come back as they were answered."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str  # images.url reads it
    detail: Literal["low", "high", "auto", "original"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("file_id") is not None:
            what = "this server keeps no files; send the image itself, as a data: URL in image_url"
            raise UnsupportedValue(f"file_id: {what}")
        return value


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Any], Field(max_length=1024)]
    id: Label | None = None
    status: Status | None = None
    phase: Label | None = None


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    namespace: Label | None = None
    id: Label | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[Any], Field(max_length=1024)]
    name: Label | None = None
    namespace: Label | None = None
    id: Label | None = None
    status: Status | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default=[], max_length=1024)
    content: Annotated[list[ReasoningPart], Field(max_length=1024)] | None = None
    encrypted_content: str | None = None
    id: Label | None = None
    status: Status | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Strict):
    """Functions whose calls come back with its name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)]
