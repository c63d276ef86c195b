"""Typed reads from a JSON object; errors name the file and the field. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported

MAX_CONFIG_BYTES = 1 << 20
# Fields that may change the computation: the values besides null that do not, a hint for the error.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "attn_logit_softcapping": ((), ""),
    "auto_map": ((), ": it asks for code of the repository, which is never run"),
    "final_logit_softcapping": ((), ""),
    "hidden_act": (("silu",), ", silu is"),
    "hidden_activation": (("silu",), ", silu is"),
    "lm_head_bias": ((False,), ""),
    "partial_rotary_factor": ((1.0,), ""),
    "use_bidirectional_attention": ((False,), ""),
}


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    if not path.is_file():
        if found := sorted(path.parent.glob("*.gguf")):
            served = "served are .safetensors files, unquantised or in fp8, beside a config.json"
            raise ModelUnsupported(f"{found[0]}: GGUF is not supported; {served}")
        raise ModelNotFound(f"{path}: no such file; a model folder holds config.json")
    if path.stat().st_size > limit:
        raise ModelInvalid(f"{path}: larger than {limit} bytes")
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.invalid(key, "a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        values = self.value(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.invalid(key, f"a list of {count} numbers")
        if not all(isinstance(value, int | float) and value > 0 for value in values):
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

    def invalid(self, key: str, expected: str) -> ModelInvalid:
        return ModelInvalid(
            f"{self.path}: {self.at}{key}: expected {expected}, got {self.raw.get(key)!r:.40}"
        )

    def unsupported(self, key: str, hint: str = "") -> ModelUnsupported:
        value = self.raw.get(key)
        return ModelUnsupported(f"{self.path}: {self.at}{key} {value!r:.80} is not supported{hint}")

    def refuse_unread(self) -> None:
        """Raises ModelUnsupported for a field that nobody read and that changes the computation."""
        unread = {key: value for key, value in self.raw.items() if key not in self.read}
        for key, (neutral, hint) in NEUTRAL.items():
            if unread.get(key) is not None and unread[key] not in neutral:
                raise self.unsupported(key, hint)
        window = unread.get("sliding_window") if unread.get("use_sliding_window", True) else None
        if window and window < self.raw.get("max_position_embeddings", 0):
            raise self.unsupported("sliding_window")
        if any(kind != "full_attention" for kind in unread.get("layer_types") or []):
            raise self.unsupported("layer_types", ", full_attention is")
