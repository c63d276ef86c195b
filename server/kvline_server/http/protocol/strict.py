"""What all request models have in common, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvline_server.http import neutral
from kvline_server.http.errors import BadRequest
from kvline_server.http.validation import bad_request

MAX_DEPTH = 32  # of lists and objects in each other, in what a template gets as it is

Label = Annotated[str, Field(max_length=512)]
Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Label],
    Field(max_length=16),
]

# Where a client would cut the prompt for a cache: ours finds the longest prefix itself.
CacheControl = Annotated[dict[str, Label], Field(max_length=4)]


def _whole(value: Any) -> Any:
    """JavaScript and spreadsheets write 8 as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[neutral.Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, value: Any) -> Any:
        return neutral.without(value, cls.ignored) if isinstance(value, dict) else value


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], value: dict[str, Any]) -> R:
    """Validates a request. Raises BadRequest with the first wrong field's name, not its value."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise bad_request(kind, error) from None


def parse_at(kind: type[R], value: Any, place: str) -> R:
    """Validates a part of a request, which is found at `place`. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{place}: must be an object", place, "invalid_type")
    try:
        return parse(kind, value)
    except BadRequest as error:
        param = f"{place}.{error.param}" if error.param else place
        message = f"{place}.{error.message}" if error.param else f"{place}: {error.message}"
        raise BadRequest(message, param, error.code) from None


def kind_of(value: Any) -> str | None:
    """The `type` of an object, which says what its other fields are."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def check_depth(value: Any, most: int) -> None:
    """Raises ValueError where lists and objects are in each other more than `most` deep."""
    if _deeper(value, most):
        raise ValueError(f"lists and objects are in each other more than {most} deep")


def _deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_deeper(item, depth - 1) for item in inner)
