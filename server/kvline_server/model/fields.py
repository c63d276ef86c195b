"""Typed reads from a JSON object; errors name the file and the field. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported

# Lists of modules that are not quantised have made files of some 100 KiB: parsed, 16 MiB of such
# text are about 100 MiB.
MAX_CONFIG_BYTES = 16 << 20
UNKNOWN = (
    ": this server does not know it, and it may change what the model computes; "
    "remove it from config.json if it does not"
)
LARGEST = 1e38  # of a number: float32's


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    if not path.is_file():
        if found := sorted(path.parent.glob("*.gguf")):
            served = (
                "served are .safetensors files, unquantised, in fp8 or MXFP4, beside a config.json"
            )
            raise ModelUnsupported(f"{found[0]}: GGUF is not supported; {served}")
        raise ModelNotFound(f"{path}: no such file; a model folder holds config.json")
    if (size := path.stat().st_size) > limit:
        raise ModelInvalid(f"{path}: {size} bytes are more than the {limit} that are read")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path}: expected a JSON object")
    return value


class Fields:
    """Remembers which fields were read, because the others must not change the computation."""

    def __init__(self, raw: dict[str, Any], path: Path, at: str = "") -> None:
        """`at` is where they are in the file, such as `rope_scaling.`"""
        self.raw = raw
        self.path = path
        self.at = at
        self.read: set[str] = set()

    def value(self, key: str, default: Any = None) -> Any:
        """The field, or `default` where it is absent or null."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.invalid(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(key, "a positive number")
        if not 0 < value < LARGEST:
            raise self.invalid(key, "a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        values = self.value(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.invalid(key, f"a list of {count} numbers")
        if not all(isinstance(value, int | float) and 0 < value < LARGEST for value in values):
            raise self.invalid(key, "positive numbers")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def section(self, key: str) -> Fields:
        """An object within; empty where it is absent or null."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self.invalid(key, "an object")
        return Fields(value, self.path, f"{self.at}{key}.")

    def null(self, key: str) -> bool:
        """Whether the field is there, and null: in some classes not the same as absent."""
        return key in self.raw and self.raw[key] is None

    def invalid(self, key: str, expected: str) -> ModelInvalid:
        found = f"got {self.raw[key]!r:.40}" if key in self.raw else "and it is missing"
        return ModelInvalid(f"{self.path}: {self.at}{key}: expected {expected}, {found}")

    def unsupported(self, key: str, hint: str = "") -> ModelUnsupported:
        value = self.raw.get(key)
        return ModelUnsupported(f"{self.path}: {self.at}{key} {value!r:.80} is not supported{hint}")

    def only(self, key: str, wanted: object, default: object = None) -> None:
        """Raises ModelUnsupported where the field has another value than the one served."""
        if self.value(key, default) != wanted:
            raise self.unsupported(key, f", {wanted!r} is")

    def refuse_unread(
        self,
        ignored: Collection[str] = (),
        neutral: Mapping[str, object] = MappingProxyType({}),
        hints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Raises ModelUnsupported for a field that nobody read, unless it is null, empty, ignored,
        or has the one value that changes nothing."""
        for key, value in self.raw.items():
            if key in self.read or key in ignored or value is None or value in ([], {}, ""):
                continue
            if key.startswith("_"):  # a private attribute of the library that saved the file
                continue
            if key not in neutral:
                raise self.unsupported(key, hints.get(key, UNKNOWN))
            self.only(key, neutral[key])
