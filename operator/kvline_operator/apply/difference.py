"""Where a live object lacks what is wanted. Pure.

It may have more: defaults and fields of others. Those that count all the same are in drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

QUANTITIES = ("cpu", "memory", "ephemeral-storage", "sizeLimit")
Step = str | int


@dataclass(frozen=True, slots=True)
class Difference:
    steps: tuple[Step, ...]  # keys and indices in the live object
    live: Any  # what is there instead; None where it is absent

    @property
    def path(self) -> str:
        return "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in self.steps).lstrip(".")


def value_at(value: Any, steps: tuple[Step, ...]) -> Any:
    """What is there in an object."""
    for step in steps:
        value = value[step]
    return value


def covers(live: Any, wanted: Any) -> bool:
    """Whether `live` has every field of `wanted`."""
    return next(differences(live, wanted), None) is None


def differences(live: Any, wanted: Any, steps: tuple[Step, ...] = ()) -> Iterator[Difference]:
    if isinstance(wanted, dict) and isinstance(live, dict):
        for name, value in wanted.items():
            have = live.get(name)
            # A `false` is no absent value: its default may be true.
            empty = value in (None, {}, []) and have in (None, {}, [])
            if not empty and name not in ("apiVersion", "kind"):
                yield from differences(have, value, (*steps, name))
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _of_lists(live, wanted, steps)
    elif live != wanted and not (_key(steps) in QUANTITIES and _same(live, wanted)):
        yield Difference(steps, live)


def _of_lists(live: list[Any], wanted: list[Any], steps: tuple[Step, ...]) -> Iterator[Difference]:
    if _key(steps) == "ownerReferences":  # others may be added
        if not all(any(covers(item, w) for item in live) for w in wanted):
            yield Difference(steps, live)
    elif len(live) != len(wanted):
        yield Difference(steps, live)
    else:
        for index, (have, want) in enumerate(zip(live, wanted, strict=True)):
            yield from differences(have, want, (*steps, index))


def _key(steps: tuple[Step, ...]) -> Step:
    """The last key, of which a list's items are."""
    return next((s for s in reversed(steps) if isinstance(s, str)), "")


def _same(live: Any, wanted: Any) -> bool:
    """Compares quantities, which the API server stores in a canonical form."""
    try:
        have, want = parse_quantity(live), parse_quantity(wanted)  # type: ignore[no-untyped-call]
        return bool(have == want)
    except (ValueError, TypeError):
        return False
