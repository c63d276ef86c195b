"""Slots of recurrent states: of running sequences, and snapshots of states for prefixes that may
come again.

Bookkeeping on slot numbers alone. Slots are reserved once. Invariant after every call: free + used
by running sequences + snapshots == total. Slot 0 is the dummy of padding; it is never given out.

A state has a fixed size and stands at one token, so a prefix is found only as far as a snapshot
stands at its end. Snapshots are at multiples of BOUNDARY tokens, under the key of the page that
ends there (pages.extend_chain). They have the slots that running sequences leave: an admission
always gets one, and evicts for it what is worth least (snapshots.py).

Most are made without a copy. A step may read one slot and write another: at a boundary a sequence
goes on in another slot, and the one that it leaves is the snapshot. Only a boundary within a chunk
of a prompt is copied by the step, in passing.

A decode with draft tokens writes a slot behind each row, and goes on from that of the last accepted
one: nothing is copied. Those slots are beside the others, as many as a step may have drafts; which
of them are left over is known once the step is read.

The calls, in the order of a step. Steps are launched in the order in which they were planned, and
run in that order on the device.

1. `release` of who is preempted, or has left or ended. Its state may be left as a snapshot, so the
   `abandon` of who has left comes after it.
2. Admission: `reach` of the keys whose pages the page pool has says how many of these are of use;
   once the sequence fits, `admit`. Its snapshot is held until the step that reads it is launched.
   A refusal needs no call: `reach` holds nothing.
3. Once the step's work is known, `plan` of each of its sequences; each plan must be launched.
4. `publish` after the launch: later admissions find what the step wrote.
5. `accept` after drafts were read, `confirm` after a finite result; `retract` after one that was
   not; `abandon` when a sequence leaves: others find only what is confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.snapshots import Idle, Snapshot

DUMMY_SLOT = 0
BOUNDARY = 64  # tokens; whole pages, and whole chunks of the kernels
PAGES = BOUNDARY // PAGE_SIZE


class StateStep(NamedTuple):
    """A sequence's part of a step."""

    slot: int  # written
    source: int  # read; its own slot, a snapshot's, or DUMMY_SLOT: none, it starts from zero
    snapshots: tuple[tuple[int, int], ...] = ()  # written in passing: behind which row, which slot
    each: tuple[int, ...] = ()  # of a decode with draft tokens: written behind each row


@dataclass(slots=True)
class StateTable:
    """A sequence's states, from its admission to its release."""

    steady: StateStep  # of a step that reads and writes its own slot
    source: Snapshot | None  # held for its first step
    fresh: bool  # its first step starts from zero
    prompt: int  # tokens that it had when it was admitted
    boundaries: tuple[int, ...]  # of snapshots that the steps of its prompt make
    branch: int  # that of them behind which others went on; 0: none
    shared: int  # tokens of the last snapshot before it that others share
    decoding: Snapshot | None = None  # the last one that it left while decoding
    unconfirmed: list[tuple[int, Snapshot]] = field(default_factory=list)  # by their tokens
    # Of a step whose draft tokens are not read yet: its first position, and what is written behind
    # each row.
    drafted: tuple[int, tuple[int, ...]] | None = None

    @property
    def slot(self) -> int:
        """Of its state, once its first step is planned."""
        return self.steady.slot

    @property
    def begun(self) -> bool:
        """Whether that was."""
        return self.source is None and not self.fresh


class StatePool:
    def __init__(self, running: int, snapshots: int, drafts: int = 0) -> None:
        """For so many running sequences, as many snapshots at least, and so many draft tokens in a
        step."""
        if running < 1 or snapshots < 0:
            raise ValueError(f"slots for {running} running sequences and {snapshots} snapshots")
        self.running, self.snapshots = running, snapshots
        self.total = running + snapshots  # without the dummy slot
        self.hit = self.lost = 0  # tokens of admissions whose pages were found; see `admit`
        self._free = list(range(self.total, DUMMY_SLOT, -1))
        self._ahead = drafts
        self._drafts = list(range(self.total + drafts, self.total, -1))  # between steps all of them
        self._used: set[int] = set()
        self._of: dict[bytes, Snapshot] = {}
        self._idle = Idle()
        self._held: set[Snapshot] = set()  # by sequences that are to read them
        # Of the step that is launched next.
        self._written: dict[bytes, Snapshot] = {}
        self._read: list[Snapshot] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def drafts(self) -> int:
        """Draft tokens that the next step may have."""
        return len(self._drafts)

    @property
    def cached(self) -> int:
        """Snapshots, those that the next launch writes included."""
        return len(self._idle) + len(self._held) + len(self._written)

    def reach(self, keys: Sequence[bytes]) -> int:
        """How many pages of these contents, which the page pool has, end where a snapshot stands;
        those behind are of no use."""
        known = self._of
        for count in range(len(keys) // PAGES * PAGES, 0, -PAGES):
            if keys[count - 1] in known:
                return count
        return 0

    def admit(self, keys: Sequence[bytes], matched: int, reach: int, tokens: int) -> StateTable:
        """A slot for a sequence of so many tokens and with these keys of its pages, of which the
        page pool has `matched`, as far as `reach`. Its prompt's steps make a snapshot at its last
        boundary, and at that where its pages went on and its state did not: others had the same
        prefix, so more may come. What is computed again for that is counted as lost."""
        assert not self._written, "a planned step is not launched"
        assert len(self._used) < self.running, "more sequences than may run"
        start, known = reach * PAGE_SIZE, matched // PAGES * BOUNDARY
        self.hit += start
        self.lost += known - start
        # The last token is computed whatever the cache has: an equal prompt needs a state before.
        wanted = {known, (tokens - 1) // BOUNDARY * BOUNDARY}
        boundaries = tuple(sorted(each for each in wanted if each > start))
        branch = known if known > start else 0
        source, shared = self._use(keys, reach) if reach else (None, 0)
        steady = StateStep(DUMMY_SLOT, DUMMY_SLOT)
        table = StateTable(steady, source, not reach, tokens, boundaries, branch, shared)
        if source is not None and not source.confirmed:
            table.unconfirmed.append((start, source))
        if source is None or source.readers or len(self._held) < self.snapshots:
            if source is not None:
                self._hold(source)
            slot = self._take()
        else:
            # As many snapshots are held as never lack a slot: it goes on in this one's own.
            slot, table.source = source.slot, None
            self._drop(source)
        self._used.add(slot)
        table.steady = StateStep(slot, slot)
        return table

    def plan(
        self, table: StateTable, start: int, rows: int, keys: Sequence[bytes], drafts: int = 0
    ) -> StateStep:
        """What a step reads and writes that computes so many rows of a sequence behind its first
        `start` tokens, the last of them `drafts`; `keys` are of all its pages whose tokens are
        known. The step's admissions and releases were before. A state is written behind each draft
        token, in a slot more, until `accept`."""
        made = self._plan(table, start, rows, keys)
        if not drafts:
            return made
        assert rows == 1 + drafts and table.drafted is None, "drafts that are not read"
        each = (table.slot, *(self._drafts.pop() for _ in range(drafts)))
        table.drafted = start, each
        return StateStep(each[-1], made.source, made.snapshots, each)

    def accept(self, table: StateTable, tokens: int) -> None:
        """After a step with drafts of it was read: it goes on behind so many tokens."""
        assert table.drafted is not None
        start, each = table.drafted
        slot = each[tokens - 1 - start]
        self._used.remove(table.slot)
        self._used.add(slot)
        self._drafts += (other for other in each if other != slot)
        table.steady, table.drafted = StateStep(slot, slot), None

    def _plan(self, table: StateTable, start: int, rows: int, keys: Sequence[bytes]) -> StateStep:
        source = table.slot  # before it is left
        if not table.begun:
            source = DUMMY_SLOT if table.source is None else table.source.slot
            if table.source is not None:
                self._read.append(table.source)
            table.source, table.fresh = None, False
        elif start % BOUNDARY:
            return table.steady  # the common case
        else:
            self._leave(table, start, keys)
        kept = []
        for boundary in table.boundaries:
            if start < boundary <= start + rows:  # of a start at a boundary too
                key = self._missing(keys, boundary)
                slot = None if key is None else self._room()
                if key is not None and slot is not None:
                    self._write(key, slot, boundary, table)
                    kept.append((boundary - start, slot))
        return StateStep(table.slot, source, tuple(kept))

    def publish(self) -> None:
        """After the launch of what was planned."""
        for snapshot in self._read:
            self._unhold(snapshot)
        for key, snapshot in self._written.items():
            self._of[key] = snapshot
            self._idle.add(snapshot)
        self._read.clear()
        self._written.clear()

    def confirm(self, table: StateTable, tokens: int) -> None:
        """After a finite result that depends on so many tokens of a sequence."""
        if table.unconfirmed:
            for at, snapshot in table.unconfirmed:
                snapshot.confirmed |= at <= tokens
            table.unconfirmed = [each for each in table.unconfirmed if not each[1].confirmed]

    def retract(self, keys: Sequence[bytes]) -> None:
        """After a result that was not finite, of a sequence with these keys of its pages: no
        snapshot of it is found any more. Who was admitted with one keeps it."""
        for snapshot in self._known(keys):
            self._forget(snapshot)

    def abandon(self, keys: Sequence[bytes]) -> None:
        """The sequence has left: what is not confirmed of it, and nobody else holds, is not found
        any more."""
        for snapshot in self._known(keys):
            if not (snapshot.confirmed or snapshot.readers):
                self._forget(snapshot)

    def release(
        self, table: StateTable, computed: int, confirmed: int, keys: Sequence[bytes]
    ) -> None:
        """The sequence is preempted, or has ended, with so many tokens computed, a finite result
        of so many, and these keys of its pages. Where its state stands at a boundary, it is left
        as a snapshot."""
        assert not self._written, "a planned step is not launched"
        if table.source is not None:
            self._unhold(table.source)
        self._end_answer(table.decoding)
        self._used.remove(table.slot)
        key = None
        if table.drafted is not None:  # who knows which of its states is at `computed`
            self._drafts += table.drafted[1][1:]
        elif table.begun and computed and not computed % BOUNDARY:
            key = self._missing(keys, computed)
        if key is None:
            self._free.append(table.slot)
        else:
            left = Snapshot(key, table.slot, computed - table.shared)
            left.confirmed = computed <= confirmed
            self._of[key] = left
            self._idle.add(left)

    def check(self, tables: Sequence[StateTable]) -> None:
        """Raises AssertionError where an invariant does not hold; `tables` are all running."""
        snapshots = [*self._idle, *self._held, *self._written.values()]
        drafted = [slot for each in tables if each.drafted for slot in each.drafted[1][1:]]
        slots = [*self._free, *self._used, *(each.slot for each in snapshots)]
        slots += [*self._drafts, *drafted]
        every = list(range(1, self.total + self._ahead + 1))
        assert sorted(slots) == every, "a slot is lost, or in two states"
        assert len(self._drafts) + len(drafted) == self._ahead
        assert sorted(each.slot for each in tables) == sorted(self._used), "a slot nobody has"
        assert len(self._used) + len(self._held) <= self.total
        assert len(self._held) <= self.snapshots, "an admission may lack a slot"
        found = set(self._of.values())
        assert all(key == each.key for key, each in self._of.items()), "keys disagree"
        assert found >= set(self._idle) and found <= set(snapshots), "a snapshot is lost"
        held = [each.source for each in tables if each.source is not None] + self._read
        assert {each: held.count(each) for each in held} == {s: s.readers for s in self._held}
        self._idle.check()

    def _known(self, keys: Sequence[bytes]) -> list[Snapshot]:
        return [self._of[key] for key in keys[PAGES - 1 :: PAGES] if key in self._of]

    def _use(self, keys: Sequence[bytes], reach: int) -> tuple[Snapshot, int]:
        """The snapshot from which a sequence goes on, and the tokens of the last one that others
        share, at it or before. The sequence has passed those between."""
        source, shared = self._of[keys[reach - 1]], 0
        for count in range(reach - PAGES, 0, -PAGES):
            below = self._of.get(keys[count - 1])
            if below is None:
                continue
            if below.shared:
                shared = count * PAGE_SIZE
                break
            if not below.passed:
                below.passed = True
                if below in self._idle:
                    self._idle.rate(below)
        source.saves = reach * PAGE_SIZE - shared
        source.reads += 1
        source.shared |= source.reads > 1
        source.passed = False
        return source, reach * PAGE_SIZE if source.shared else shared

    def _leave(self, table: StateTable, start: int, keys: Sequence[bytes]) -> None:
        """Its state stands at a boundary: it goes on in another slot, and leaves its own as a
        snapshot."""
        decodes = start >= table.prompt
        if not decodes and start not in table.boundaries:
            return
        key = self._missing(keys, start)
        if key is None:
            return
        slot, before = None, table.decoding
        if before is not None and before.decoding and not before.reads:
            self._drop(before)  # of an answer the last one is enough
            slot = before.slot
        else:
            slot = self._room()
        if slot is None:
            return
        made = self._write(key, table.slot, start, table)
        self._used.remove(table.slot)
        self._used.add(slot)
        table.steady = StateStep(slot, slot)
        if decodes:
            self._end_answer(before)
            made.decoding, table.decoding = True, made

    def _end_answer(self, snapshot: Snapshot | None) -> None:
        """The last one that a sequence left while decoding, which leaves none in its place."""
        if snapshot is not None and snapshot.decoding:
            snapshot.decoding = False
            if snapshot in self._idle:
                self._idle.add(snapshot)

    def _missing(self, keys: Sequence[bytes], tokens: int) -> bytes | None:
        """The key of a snapshot at a boundary; None where there is one, or it is not known."""
        page = tokens // PAGE_SIZE - 1
        if page >= len(keys) or keys[page] in self._of or keys[page] in self._written:
            return None
        return keys[page]

    def _write(self, key: bytes, slot: int, tokens: int, table: StateTable) -> Snapshot:
        made = self._written[key] = Snapshot(key, slot, tokens - table.shared)
        if tokens == table.branch:
            made.shared, table.shared = True, tokens
        table.unconfirmed.append((tokens, made))
        return made

    def _room(self) -> int | None:
        """A slot for a snapshot; None while all others are used or held."""
        return self._take() if self._free or self._idle else None

    def _take(self) -> int:
        """A free slot, or that of the snapshot that is worth least."""
        if self._free:
            return self._free.pop()
        snapshot = self._idle.pop()
        self._drop(snapshot)
        return snapshot.slot

    def _hold(self, snapshot: Snapshot) -> None:
        snapshot.readers += 1
        self._idle.discard(snapshot)
        self._held.add(snapshot)

    def _unhold(self, snapshot: Snapshot) -> None:
        snapshot.readers -= 1
        if snapshot.readers:
            return
        self._held.remove(snapshot)
        if self._of.get(snapshot.key) is snapshot:
            self._idle.add(snapshot)
        else:  # retracted meanwhile
            self._free.append(snapshot.slot)

    def _drop(self, snapshot: Snapshot) -> None:
        """Whose slot is another's from now on."""
        del self._of[snapshot.key]
        self._idle.discard(snapshot)
        snapshot.decoding = False

    def _forget(self, snapshot: Snapshot) -> None:
        self._drop(snapshot)
        if not snapshot.readers:
            self._free.append(snapshot.slot)
