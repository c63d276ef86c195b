"""Values of settings with which a failed start would succeed, and how messages name them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvline_contract.report import Direction, Knob

CONTEXT_FIELD = "spec.engine.maxModelLen"
MEMORY_FIELD = "spec.resources.memory"
PREFILL_FIELD = "spec.engine.maxPrefillTokens"
RUNNING_FIELD = "spec.engine.maxRunningRequests"
SNAPSHOTS_FIELD = "spec.engine.prefixSnapshots"
HEADROOM_FIELD = "spec.capacity.headroomMiB"
PIN_FIELD = "spec.capacity.kvTokens"
MEMORY_STEP = 16  # MiB: use differs by a few of them between two starts
NOTHING = "no other value of one setting would be enough"


@dataclass(frozen=True, slots=True)
class Offer:
    knob: Knob
    tokens: int | None = None  # that the KV cache would have; None: not known
    also: Knob | None = None  # without which it would not be enough

    @classmethod
    def lower(cls, spec_field: str, value: int, tokens: int) -> Offer:
        return cls(Knob(spec_field, Direction.LOWER, value), tokens)

    @classmethod
    def both(cls, one: Knob, other: Knob) -> Offer:
        return cls(replace(one, with_next=True), also=other)

    @classmethod
    def of_context(cls, largest: int, tokens: int) -> Offer:
        return cls.lower(CONTEXT_FIELD, largest, tokens)

    @classmethod
    def of_memory(cls, mib: int, tokens: int | None) -> Offer:
        whole = -(-mib // MEMORY_STEP) * MEMORY_STEP
        return cls(Knob(MEMORY_FIELD, Direction.RAISE, whole), tokens)

    def __str__(self) -> str:
        knob = self.knob
        if knob.value is None:
            return f"{knob.direction} {knob.spec_field}, by how much could not be measured"
        unit = "Mi" if knob.spec_field == MEMORY_FIELD else ""
        if self.tokens is None:
            bound = "least" if knob.direction is Direction.RAISE else "most"
            also = f" and {self.also.spec_field} to {self.also.value}" if self.also else ""
            return f"{knob.direction} {knob.spec_field} to {knob.value}{unit}{also} at {bound}"
        return f"{knob.spec_field} {knob.value}{unit} would leave {self.tokens:,} tokens"


def advice(offers: tuple[Offer, ...], gpu: bool = False) -> str:
    """What would help, each by itself."""
    if offers:
        return "; or ".join(map(str, offers))
    return f"{NOTHING}: take a GPU with more memory" if gpu else NOTHING


def knobs(offers: tuple[Offer, ...]) -> tuple[Knob, ...]:
    each = (knob for offer in offers for knob in (offer.knob, offer.also))
    return tuple(knob for knob in each if knob is not None)


def best(
    candidates: Iterable[int],
    leaves: Callable[[int], int | None],
    least: Callable[[int], int],
    target: int,
) -> tuple[int, int] | None:
    """The largest of the candidates, which rise, that still leaves `target` tokens, or the smallest
    where that leaves fewer, and its tokens; None where it leaves less than the least of what a
    start needs. `leaves` plays a value; None where it must not, and so nothing beyond it."""
    found: tuple[int, int] | None = None
    for value in candidates:
        tokens = leaves(value)
        if tokens is None or tokens < max(least(value), target if found else 0):
            break
        found = value, tokens
    return found


def doubled(low: int, below: int, factor: int = 2) -> list[int]:
    """`low`, and each time `factor` times as much, below a value."""
    out = []
    while low < below:
        out.append(low)
        low *= factor
    return out
