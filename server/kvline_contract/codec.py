"""JSON to frozen dataclasses and back: camelCase keys, integers only, bounds on everything.

Every document of the contract is a dataclass whose fields carry their bounds. Reading is strict
(unknown keys fail) or tolerant (unknown keys are ignored); a wrong type, a number out of range or a
text that is too long always fails.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INTEGER = 2**53 - 1  # the largest that every JSON reader keeps exact
MAX_TEXT = 1024
MAX_KEY = 64  # characters of a map's key, where its field does not say otherwise


class ContractError(ValueError):
    """An invalid document; the message names the field, what was expected and what was found."""


def field(
    key: str | None = None,
    *,
    low: int = 0,
    high: int = MAX_INTEGER,
    limit: int = MAX_TEXT,
    items: int = 16,
    keys: int = MAX_KEY,
    omit_none: bool = False,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """A document's field: its JSON key, bounds of a number, length of a text, items of a list or
    map, characters of a map's key."""
    metadata = {
        "key": key,
        "low": low,
        "high": high,
        "limit": limit,
        "items": items,
        "keys": keys,
        "omit_none": omit_none,
    }
    made: Any = dataclasses.field  # whose overloads take one kind of default each
    return made(metadata=metadata, default=default, default_factory=default_factory)


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
def document(cls: type[T]) -> type[T]:
    """A frozen dataclass that this module can read and write."""
    return dataclasses.dataclass(frozen=True, slots=True)(cls)


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    name: str
    key: str
    kind: Any
    bounds: Any
    required: bool


@cache
def _slots(cls: Any) -> tuple[_Slot, ...]:
    hints = typing.get_type_hints(cls)
    bare = field().metadata
    return tuple(
        _Slot(
            f.name,
            f.metadata.get("key") or camel(f.name),
            hints[f.name],
            f.metadata or bare,
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    )


def encode(value: Any) -> Any:
    """A dataclass of the contract as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for slot in _slots(type(value)):
            item = getattr(value, slot.name)
            if item is None and slot.bounds["omit_none"]:
                continue
            out[slot.key] = encode(item)
        return out
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def dumps(value: Any) -> str:
    return json.dumps(encode(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def loads(text: str | bytes, limit: int) -> dict[str, Any]:
    """One JSON object of at most `limit` bytes: no NaN, no float, no duplicate key."""
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) > limit:
        raise ContractError(f"document of {len(raw)} bytes, at most {limit} are read")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_refuse_constant,
        )
    except ContractError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContractError(f"not a JSON document: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ContractError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ContractError("duplicate key in an object")
    return out


def _refuse_constant(text: str) -> Any:
    raise ContractError(f"{text[:20]}: only integers are numbers here")


def decode(cls: type[T], value: Any, *, strict: bool, path: str = "") -> T:
    """`value` as a `cls`; raises ContractError with the field's path."""
    if not isinstance(value, dict):
        raise ContractError(f"{path or 'document'}: expected an object, got {_kind(value)}")
    slots = _slots(typing.cast(Any, cls))
    if strict:
        known = {slot.key for slot in slots}
        for key in value:
            if key not in known:
                raise ContractError(f"{_join(path, str(key)[:64])}: unknown field")
    arguments = {}
    for slot in slots:
        where = _join(path, slot.key)
        if slot.key not in value:
            if slot.required:
                raise ContractError(f"{where}: missing")
            continue
        arguments[slot.name] = _read(slot.kind, value[slot.key], slot.bounds, strict, where)
    try:
        return cls(**arguments)
    except ContractError as error:
        raise ContractError(f"{path + ': ' if path else ''}{error}") from None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _read(kind: Any, value: Any, bounds: Any, strict: bool, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
        origin = typing.get_origin(kind)
    if origin is tuple:
        return _read_items(typing.get_args(kind)[0], value, bounds, strict, where)
    if origin is dict:
        return _read_map(typing.get_args(kind)[1], value, bounds, strict, where)
    if dataclasses.is_dataclass(kind):
        return decode(typing.cast(type, kind), value, strict=strict, path=where)
    return _read_scalar(kind, value, bounds, where)


def _read_items(kind: Any, value: Any, bounds: Any, strict: bool, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ContractError(f"{where}: expected a list, got {_kind(value)}")
    if len(value) > bounds["items"]:
        raise ContractError(f"{where}: {len(value)} items, at most {bounds['items']}")
    return tuple(_read(kind, v, bounds, strict, f"{where}[{i}]") for i, v in enumerate(value))


def _read_map(kind: Any, value: Any, bounds: Any, strict: bool, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {_kind(value)}")
    if len(value) > bounds["items"]:
        raise ContractError(f"{where}: {len(value)} entries, at most {bounds['items']}")
    out = {}
    for key, item in value.items():
        if len(key) > bounds["keys"]:
            most = bounds["keys"]
            raise ContractError(f"{where}: a key of {len(key)} characters, at most {most}")
        out[key] = _read(kind, item, bounds, strict, f"{where}.{key}")
    return out


def _read_scalar(kind: Any, value: Any, bounds: Any, where: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise ContractError(f"{where}: expected true or false, got {_kind(value)}")
        return value
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ContractError(f"{where}: expected an integer, got {_kind(value)}")
        if not bounds["low"] <= value <= bounds["high"]:
            raise ContractError(
                f"{where}: expected {bounds['low']} to {bounds['high']}, got {str(value)[:24]}"
            )
        return value
    if not isinstance(value, str):
        raise ContractError(f"{where}: expected text, got {_kind(value)}")
    if len(value) > bounds["limit"]:
        raise ContractError(f"{where}: {len(value)} characters, at most {bounds['limit']}")
    if kind is str:
        return value
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise ContractError(f"{where}: expected one of {allowed}, got {value[:40]!r}") from None
