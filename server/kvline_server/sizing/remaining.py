"""How long the rest of a start may take, by the steps that it has played and by a record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Remaining:
    # Seconds of a step of each name, as it was played last.
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name] = seconds

    def rest(self, left: Sequence[str], names: Sequence[str], again: bool) -> float | None:
        """Seconds of the steps that are `left` of a set, and `again` of the whole set: its
        validation. Steps that were not played are taken for mean ones; None where none was."""
        if not self.seconds:
            return None
        mean = sum(self.seconds.values()) / len(self.seconds)
        steps = [*left, *(names if again else ())]
        return sum(self.seconds.get(name, mean) for name in steps)
