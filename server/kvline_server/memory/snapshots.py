"""Snapshots of recurrent states, and which of them is worth least.

All have one size, so one is worth what it saves: the tokens behind the last snapshot that others
share, which would be computed again. One that a conversation has passed is evicted first: its next
turn goes on from a later one. docs/decisions/060 has the simulation that chose this.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

# What a snapshot saves may keep it so many times as long as the one that was used least lately,
# and counts again for each sequence that went on from it, up to these.
KEEP = 4
READS = 2
FADE = 0.999  # of the most that any saves, with each use of one
NOTHING = -math.inf


@dataclass(slots=True, eq=False)
class Snapshot:
    key: bytes
    slot: int
    saves: int  # tokens
    readers: int = 0  # sequences whose step that reads it is not launched yet
    reads: int = 0  # sequences that went on from it
    shared: bool = False  # different sequences go on from it
    passed: bool = False  # who went on from it is further by now
    decoding: bool = False  # of a sequence that runs and will leave a later one in its place
    confirmed: bool = False  # a result that depends on it was finite
    used: int = 0  # when it was last, counted in uses of all
    worth: float = 0.0


class Idle:
    """Those that may be evicted: no step that is not launched yet reads or writes them."""

    def __init__(self) -> None:
        self._by_use: OrderedDict[Snapshot, None] = OrderedDict()
        self._by_worth: list[tuple[float, int, Snapshot]] = []  # a heap; outdated ones too
        self._uses, self._most = 0, 1.0

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._by_use)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._by_use

    def add(self, snapshot: Snapshot) -> None:
        """It is used now, and may be evicted from now on."""
        self._uses += 1
        snapshot.used = self._uses
        self._by_use[snapshot] = None
        self._by_use.move_to_end(snapshot)
        self.rate(snapshot)

    def rate(self, snapshot: Snapshot) -> None:
        """By its last use, and by what it saves; both compared with the others', how long these
        stay and the most that any saves. That of an answer saves nothing before its end."""
        saves = snapshot.saves * (1 + min(snapshot.reads, READS))
        self._most = max(float(saves), self._most * FADE)
        age = self._uses - next(iter(self._by_use)).used
        bonus = 0.0 if snapshot.decoding else KEEP * age * saves / self._most
        snapshot.worth = NOTHING if snapshot.passed else snapshot.used + bonus
        heapq.heappush(self._by_worth, (snapshot.worth, snapshot.used, snapshot))
        if len(self._by_worth) > 8 * (8 + len(self)):
            self._by_worth = [(each.worth, each.used, each) for each in self]
            heapq.heapify(self._by_worth)

    def discard(self, snapshot: Snapshot) -> None:
        self._by_use.pop(snapshot, None)

    def pop(self) -> Snapshot:
        """The one that is worth least."""
        while True:
            worth, _, snapshot = heapq.heappop(self._by_worth)
            if snapshot in self and worth == snapshot.worth:
                del self._by_use[snapshot]
                return snapshot

    def check(self) -> None:
        """Raises AssertionError where one would never be evicted."""
        rated = {each for worth, _, each in self._by_worth if worth == each.worth}
        assert set(self) <= rated, "a snapshot without its worth"
