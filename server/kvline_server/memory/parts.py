"""Memory that its owner keeps on a rank's device, by name: a part of the sizing report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnedPart:
    name: str  # as kvline_contract.memory has it
    fixed: int = 0  # bytes, whatever the size of the KV cache
    per_token: int = 0  # bytes of each of its tokens
