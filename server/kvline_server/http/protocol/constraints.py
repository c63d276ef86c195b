"""What an answer must look like: response_format, as OpenAI has it, and structured_outputs, as
vLLM has it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvline_server.grammars.grammar import MAX_CHOICES, MAX_PATTERN
from kvline_server.http.protocol.strict import Strict, check_depth
from kvline_server.http.protocol.tools import MAX_SCHEMA_DEPTH
from kvline_server.options.grammars import MAX_BYTES

Grammar = Annotated[str, Field(min_length=1, max_length=MAX_BYTES)]


def check_schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Raises ValueError where a schema is too large or too deep to be looked at."""
    check_depth(value, MAX_SCHEMA_DEPTH)
    if value and len(json.dumps(value, ensure_ascii=False)) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} characters")
    return value


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False

    _bounded = field_validator("schema_")(check_schema)


class Structure(Strict):
    """Between `begin` and `end` the text follows the schema."""

    begin: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: dict[str, Any] = Field(alias="schema")
    end: Annotated[str, Field(max_length=256)]

    _bounded = field_validator("schema_")(check_schema)


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    # Of structural_tag: either the newer form, or both of the older.
    format: dict[str, Any] | None = None
    structures: Annotated[list[Structure], Field(min_length=1, max_length=256)] | None = None
    triggers: Annotated[list[Grammar], Field(min_length=1, max_length=256)] | None = None

    _bounded = field_validator("format")(check_schema)

    @model_validator(mode="after")
    def _of_its_type(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: with type json_schema, and with no other")
        newer, older = self.format is not None, self.structures is not None
        tag = self.type == "structural_tag"
        if older != (self.triggers is not None) or newer + older != tag:
            raise ValueError("type: structural_tag alone has format, or structures and triggers")
        return self


class StructuredOutputs(Strict):
    """One constraint, and how it writes JSON."""

    json_: dict[str, Any] | Grammar | None = Field(default=None, alias="json")
    regex: Grammar | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
        | None
    ) = None
    grammar: Grammar | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | Grammar | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Annotated[str, Field(max_length=MAX_PATTERN)] | None = None

    @field_validator("json_", "structural_tag")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        return check_schema(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object)
        if sum(each is not None for each in (*given, self.structural_tag)) != 1:
            raise ValueError(
                "must have exactly one of json, regex, choice, grammar, json_object and "
                "structural_tag"
            )
        return self
