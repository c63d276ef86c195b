"""Slots of recurrent states: reserved as the model loads, from what is asked, so that the KV cache
is sized beside them (docs/decisions/060)."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract.memory import SNAPSHOTS, STATES
from kvline_server.memory.parts import OwnedPart
from kvline_server.memory.states import StatePool
from kvline_server.sizing.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Slots:
    """Of a rank; none of a model without recurrent layers."""

    nbytes: int = 0  # of a state, in all layers
    running: int = 0
    snapshots: int = 0

    @classmethod
    def of(cls, settings: EngineSettings, nbytes: int) -> Slots:
        return cls(nbytes, settings.max_running_requests, settings.snapshots) if nbytes else cls()

    @property
    def reserved(self) -> int:
        """Bytes, the dummy's too."""
        return self.nbytes * (1 + self.running + self.snapshots)

    def parts(self) -> tuple[OwnedPart, ...]:
        each = f"{self.nbytes / 2**20:.1f} MiB a sequence"
        running = OwnedPart(STATES, fixed=self.nbytes * (1 + self.running), detail=each)
        kept = OwnedPart(SNAPSHOTS, fixed=self.nbytes * self.snapshots, detail="kept for prefixes")
        return tuple(part for part in (running, kept) if part.fixed)

    def pool(self) -> StatePool | None:
        return StatePool(self.running, self.snapshots) if self.nbytes else None


NO_SLOTS = Slots()


def most_running(settings: EngineSettings, nbytes: int, free: int) -> int:
    """The most requests, of those that are asked and fewer, whose slots fit in so many bytes."""
    for running in range(settings.max_running_requests, 0, -1):
        if Slots.of(settings.changed(max_running_requests=running), nbytes).reserved <= free:
            return running
    return 0
