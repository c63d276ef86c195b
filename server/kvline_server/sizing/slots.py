"""Slots of recurrent states: reserved as the model loads, from what is asked, so that the KV cache
is sized beside them (docs/decisions/060)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvline_contract.launch import StateDtype, usual_snapshots
from kvline_contract.memory import SNAPSHOTS, STATES
from kvline_contract.report import Direction, Knob
from kvline_server.memory.parts import OwnedPart
from kvline_server.memory.states import StatePool
from kvline_server.sizing.offers import RUNNING_FIELD, SNAPSHOTS_FIELD, Offer
from kvline_server.sizing.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Slots:
    """Of a rank; none of a model without recurrent layers."""

    nbytes: int = 0  # of a state, in all layers
    running: int = 0
    snapshots: int = 0
    dtype: StateDtype = StateDtype.FLOAT32  # of its matrices
    in_bfloat16: int = 0  # bytes of a state then, where that is served and was not asked for
    drafts: int = 0  # behind draft tokens

    @classmethod
    def of(cls, settings: EngineSettings, nbytes: int, in_bfloat16: int = 0) -> Slots:
        if not nbytes:
            return cls()
        asked = settings.max_running_requests, settings.snapshots, settings.state_dtype
        return cls(nbytes, *asked, in_bfloat16, settings.draft_states)

    @property
    def reserved(self) -> int:
        """Bytes, the dummy's too."""
        return self.nbytes * (1 + self.running + self.drafts + self.snapshots)

    def parts(self) -> tuple[OwnedPart, ...]:
        each = f"{self.nbytes / 2**20:.1f} MiB a sequence, in {self.dtype}"
        each += f", and {self.drafts} more behind draft tokens" if self.drafts else ""
        taken = self.nbytes * (1 + self.running + self.drafts)
        running = OwnedPart(STATES, fixed=taken, detail=each)
        kept = OwnedPart(SNAPSHOTS, fixed=self.nbytes * self.snapshots, detail="kept for prefixes")
        return tuple(part for part in (running, kept) if part.fixed)

    def pool(self) -> StatePool | None:
        return StatePool(self.running, self.snapshots, self.drafts) if self.nbytes else None


NO_SLOTS = Slots()


def fitting(settings: EngineSettings, nbytes: int, free: int) -> tuple[Offer, ...]:
    """What to ask for less of, where slots of so many bytes do not fit in `free` bytes beside what
    requests take: the most that does of each setting, or of both where no number of one does."""

    def fits(**changed: int) -> bool:
        made = settings.changed(**changed)
        return Slots.of(made, nbytes).reserved + made.reserved() <= free

    running = _most(1, settings.max_running_requests, lambda n: fits(max_running_requests=n))
    kept = _most(0, settings.snapshots, lambda n: fits(asked_snapshots=n))
    found = (RUNNING_FIELD, running), (SNAPSHOTS_FIELD, kept)
    offers = tuple(Offer(_lower(name, n)) for name, n in found if n is not None)
    if offers:
        return offers
    pair = _pair(settings, lambda n, k: fits(max_running_requests=n, asked_snapshots=k))
    return () if pair is None else (pair,)


def refused(settings: EngineSettings, nbytes: int, free: int) -> tuple[Offer, ...]:
    """What to ask for less of, where a device refused them with so many bytes free."""
    if Slots.of(settings, nbytes).reserved + settings.reserved() > free:
        return fitting(settings, nbytes, free)
    asked = (RUNNING_FIELD, SNAPSHOTS_FIELD)[: 2 if settings.snapshots else 1]
    return tuple(Offer(Knob(name, Direction.LOWER)) for name in asked)


def _pair(settings: EngineSettings, fits: Callable[[int, int], bool]) -> Offer | None:
    """The most requests with as many snapshots as they have by default, no more than were asked; or
    one request with those that fit."""

    def usual(running: int) -> int:
        return min(settings.snapshots, usual_snapshots(running))

    running = _most(1, settings.max_running_requests, lambda n: fits(n, usual(n)))
    if running is not None:
        kept: int | None = usual(running)
    else:
        running, kept = 1, _most(0, usual(1), lambda k: fits(1, k))
    if kept is None:
        return None
    return Offer.both(_lower(RUNNING_FIELD, running), _lower(SNAPSHOTS_FIELD, kept))


def _lower(spec_field: str, value: int) -> Knob:
    return Knob(spec_field, Direction.LOWER, value)


def _most(least: int, below: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, from `least` on; where one does, all smaller ones do."""
    if least >= below or not fits(least):
        return None
    while below - least > 1:
        middle = (least + below) // 2
        least, below = (middle, below) if fits(middle) else (least, middle)
    return least
