"""The memory of a rank's device by part, so that every MiB of it has a name. Pure.

The runtime is the rest that no other part explains: what an engine's process has besides its
weights cannot be measured apart from them. Where parts were measured at different moments and
explain more than there is, the difference is `others`, which says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvline_contract.memory import KV_CACHE, OTHERS, RUNTIME, Memory, Part

MIB = 1 << 20
OVERLAP = "measured at other moments"


@dataclass(frozen=True, slots=True)
class Taken:
    name: str  # as kvline_contract.memory has it
    nbytes: int
    detail: str | None = None


def whole(total: int, parts: Iterable[Taken], runtime: str, gpu: int | None = None) -> Memory:
    """Of `total` bytes those that no part explains are the runtime, whose detail is `runtime`."""
    found = [Part(part.name, max(0, part.nbytes) // MIB, part.detail) for part in parts]
    rest = total // MIB - sum(part.mib for part in found)
    found.append(Part(RUNTIME, max(0, rest), runtime))
    found.append(Part(OTHERS, min(0, rest), OVERLAP if rest < 0 else None))
    return Memory(total // MIB, tuple(found), gpu)


def needed(total: int, parts: Iterable[Taken], gpu: int | None = None) -> Memory:
    """Of a start that failed. What the parts leave of `total` bytes is the KV cache's; where they
    need more than there is, `others` is what is missing."""
    found, taken = [], 0
    for part in parts:
        before, taken = taken, taken + max(0, part.nbytes)
        found.append(Part(part.name, taken // MIB - before // MIB, part.detail))
    rest = total // MIB - taken // MIB
    found.append(Part(KV_CACHE, max(0, rest)))
    found.append(Part(OTHERS, min(0, rest), "missing" if rest < 0 else None))
    return Memory(total // MIB, tuple(found), gpu)


def sentence(memory: Memory) -> str:
    """Each part with its MiB; together they are the total, or name what is missing."""
    parts = [part for part in memory.parts if part.mib > 0]
    text = ", ".join(f"{part.name} {part.mib} MiB" for part in parts)
    missing = -memory.mib(OTHERS)
    short = f" ({missing} MiB more than there are)" if missing > 0 else ""
    return f"of {memory.total_mib} MiB {text}{short}"
