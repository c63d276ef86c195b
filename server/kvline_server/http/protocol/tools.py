"""The functions that a model may call, and which of them it must."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import to_json

from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.strict import CacheControl, Strict, check_depth, kind_of
from kvline_server.http.validation import UnsupportedValue

MAX_TOOLS = 256
MAX_TOOL_BYTES = 512 << 10  # of all tools as JSON; a coding agent's eleven have 68 kB
MAX_SCHEMA_DEPTH = 64
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _shallow(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_depth(value, MAX_SCHEMA_DEPTH)
        return value


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        """Before its fields, of which each kind of tool has others."""
        if kind_of(value) not in (None, "function"):
            raise UnsupportedValue("type: must be function; no other tools are supported here")
        return value

    def rendered(self) -> dict[str, Any]:
        """The tool as the chat template gets it: as transformers describes a function, whatever
        the order that it came in."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        given = self.function.parameters
        function["parameters"] = NO_PARAMETERS if given is None else given
        return {"type": "function", "function": function}


class Named(Strict):
    name: ToolName


class NamedTool(Strict):
    """The one function that the model must call."""

    type: Literal["function"]
    function: Named

    @model_validator(mode="before")
    @classmethod
    def _only_a_function(cls, value: Any) -> Any:
        if kind_of(value) not in (None, "function"):
            raise UnsupportedValue("type: must be function; no other choice is supported here")
        return value


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_left_out(tool: Any, place: str) -> None:
    """Of a tool that the model is not offered, but that an answer repeats. Raises BadRequest."""
    try:
        check_depth(tool, MAX_SCHEMA_DEPTH)
    except ValueError as error:
        raise BadRequest(f"{place}: {error}", place, "invalid_value") from None


def check_tools(tools: Iterable[Tool]) -> None:
    """Raises ValueError, whose message begins with the field below `tools`."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            raise ValueError(f"[{index}].function.name: another tool has this name")
        seen.add(tool.function.name)
    if len(to_json([tool.rendered() for tool in tools]).decode()) > MAX_TOOL_BYTES:
        raise ValueError(f"have more than {MAX_TOOL_BYTES} characters")
