"""The result of step 2 of the profile loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvline_contract.memory import COLLECTIVES
from kvline_server.engine.stress.owners import StressSet
from kvline_server.memory import parts
from kvline_server.memory.groups import CacheGroup
from kvline_server.memory.parts import OwnedPart
from kvline_server.parallel.executor import Executor
from kvline_server.sizing.slots import NO_SLOTS, Slots


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on the devices, and empty arenas."""

    executor: Executor
    vocabulary: int
    # On every rank, loaded or of each token.
    owned: tuple[OwnedPart, ...]
    groups: tuple[CacheGroup, ...]  # of the model's layers, on each rank
    stress: StressSet  # its largest steps
    fingerprint: str
    cache_dtype: str
    note: str = ""  # Backend's
    windowed: bool = False  # some of the model's layers have a window
    slots: Slots = NO_SLOTS  # of recurrent states, on each rank

    @property
    def bytes_per_token(self) -> int:
        return parts.per_token(self.owned)

    def on(self, executor: Executor, collectives: int) -> Loaded:
        """The same on all ranks of an executor, whose exchange takes so many bytes of each."""
        part = exchanged(collectives)
        return replace(self, executor=executor, owned=(*self.owned, part))


def exchanged(nbytes: int) -> OwnedPart:
    """What the exchange between ranks takes."""
    return OwnedPart(COLLECTIVES, fixed=nbytes, outside=True)
