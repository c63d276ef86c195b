"""Which value of each setting would let a failed start succeed: by the stress set under it.

A value is offered only where it helps by itself. What raises the memory in use is not played beyond
what is known to fit, as a kill would take the diagnosis along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvline_contract.report import Direction, Knob
from kvline_server.errors import DeviceOutOfMemory, StepTooLong
from kvline_server.memory.device import MIB
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.sizing.offers import (
    CONTEXT_FIELD,
    HEADROOM_FIELD,
    MEMORY_FIELD,
    PIN_FIELD,
    PREFILL_FIELD,
    RUNNING_FIELD,
    Offer,
    best,
    doubled,
)
from kvline_server.sizing.search import Search
from kvline_server.sizing.session import PROBE_TOKENS, Session, whole_pages
from kvline_server.sizing.settings import EngineSettings, logprob_rows
from kvline_server.sizing.slots import Slots

SECONDS = 60.0  # after which no other value is tried
LEAST = 2 * PAGE_SIZE  # tokens, without which no start succeeds
USEFUL = 4096  # tokens
SHORTEST = 256  # tokens of a context
SAFE_PERCENT = 95  # of an estimate that is validated
REPEATS = 64  # until a limit holds what it makes larger itself
NOISE = 20  # peaks of two starts differ by up to 1/NOISE of the memory on a CPU
NEAR = (
    20  # contexts that differ by 1/NEAR at most are compared: memory bounds those that are sought
)
CAUTION = 1.1  # of a growth that is only extrapolated


@dataclass(frozen=True, slots=True)
class Found:
    """By a probe under this start's own settings."""

    tokens: int  # less than 0 where something is missing
    longest: int  # tokens of the longest sequence that it played


@dataclass(frozen=True, slots=True)
class Played:
    """What a trial of other settings showed."""

    longest: int  # tokens of the longest sequence of its last probe
    growth: int  # bytes that the steps of that took at most


@dataclass(frozen=True, slots=True)
class Point:
    """What steps took at most."""

    at: int  # rows of the largest step, or tokens of the longest sequence
    beside: int  # the other of the two
    nbytes: int


class Adviser:
    def __init__(
        self,
        session: Session,
        found: Found | None,
        validated: bool = False,
        killed: bool = False,
    ) -> None:
        """`found` is None where no probe survived: it was refused memory, or `killed`. What is
        `validated` was played at its own size, as estimates of this start were wrong."""
        self.session, self.found = session, found
        self.validated, self.killed = validated, killed
        self.settings = session.settings
        asked = self.settings.max_model_len
        self.least = max(asked or 0, LEAST)
        self.target = asked or min(USEFUL, self.settings.wanted_len)
        # Tokens more that a value must leave: the next start may need as much more.
        self.spare = session.device.slack // session.bytes_per_token
        self.growth = max(rank.growth for rank in session.measured.ranks)
        self.ends = session.clock() + SECONDS
        self.grown: list[Point] = []  # by rows
        self.lengthened: list[Point] = []  # by the longest sequence

    def offers(self) -> tuple[Offer, ...]:
        lower = [self._prefill()]
        if self.found is not None:
            lower += [self._running(), self._headroom()]
        if not self.killed and (self.found is None or self.found.tokens < LEAST):
            lower.append(self._context())
        return (*self._memory(), *(offer for offer in lower if offer is not None))

    def pins(self) -> tuple[Offer, ...]:
        """For a pinned size that is too large."""
        tokens = self._play(self.settings)
        if not tokens or tokens < self.least:
            return self.unplayed(PIN_FIELD)
        pinned = self.settings.pinned_kv_tokens or 0
        missing = (pinned - tokens) * self.session.bytes_per_token
        return (Offer.lower(PIN_FIELD, tokens, tokens), *self._raised(missing, pinned))

    def unplayed(self, spec_field: str = PREFILL_FIELD) -> tuple[Offer, ...]:
        """Directions, where values cannot be measured."""
        lower = Offer(Knob(spec_field, Direction.LOWER))
        if self.session.device.gpu:
            return (lower,)
        return (Offer(Knob(MEMORY_FIELD, Direction.RAISE)), lower)

    def _prefill(self) -> Offer | None:
        low = max(self.settings.least_rows(self.settings.max_running_requests), PAGE_SIZE)
        values = doubled(low, self.settings.max_prefill_tokens)
        if self._gains_too_little(self.settings, self.growth):
            return None
        made = best(values, self._rows, lambda _: self.least + self.spare, self.target)
        return made and Offer.lower(PREFILL_FIELD, *made)

    def _rows(self, rows: int) -> int | None:
        if self.killed and extrapolated(self.grown, rows) * CAUTION > self._free():
            return None
        tokens, played = self._try(self.settings.changed(max_prefill_tokens=rows))
        if played is not None:
            self.grown.append(Point(rows, played.longest, played.growth))
        return tokens

    def _running(self) -> Offer | None:
        values = doubled(1, self.settings.max_running_requests, 4)
        per_token = self.session.bytes_per_token
        if self._gains_too_little(self.settings.changed(max_running_requests=1), self.growth):
            return None

        def leaves(running: int) -> int | None:
            fewer = self.settings.changed(max_running_requests=running)
            tokens = self._play(fewer)
            # Slots of recurrent states stay reserved in a trial.
            return None if tokens is None else tokens + self._slots(fewer) // per_token

        made = best(values, leaves, lambda _: self.least + self.spare, self.target)
        return made and Offer.lower(RUNNING_FIELD, *made)

    def _context(self) -> Offer | None:
        values = doubled(SHORTEST, self.settings.wanted_len, 4)
        if self._gains_too_little(self.settings.changed(max_model_len=SHORTEST), self.growth):
            return None
        most = SHORTEST

        def leaves(context: int) -> int | None:
            nonlocal most
            if context > most:
                return None  # a longer one leaves no more
            tokens, played = self._try(self.settings.changed(max_model_len=context))
            if played is not None:
                rows = self.settings.max_prefill_tokens
                self.lengthened.append(Point(context, rows, played.growth))
            most = tokens or 0
            return most

        made = best(values, leaves, lambda context: context + self.spare, 0)
        return made and Offer.lower(CONTEXT_FIELD, *made)

    def _headroom(self) -> Offer | None:
        """The largest that leaves enough, or 0."""
        assert self.found is not None
        bytes_short = (self.target - self.found.tokens) * self.session.bytes_per_token
        kept = self.settings.headroom_mib - -(-bytes_short // MIB) - 1
        if self._gains_too_little(self.settings.changed(headroom_mib=0), 0):
            return None
        for value in dict.fromkeys((max(0, kept), 0)):
            if value >= self.settings.headroom_mib:
                continue
            tokens = self._play(self.settings.changed(headroom_mib=value))
            if tokens is not None and tokens >= self.least + self.spare:
                return Offer.lower(HEADROOM_FIELD, value, tokens)
        return None

    def _memory(self) -> tuple[Offer, ...]:
        """Played contexts are the longest that are known to fit."""
        if self.found is not None:
            tokens = self.least if self.least > LEAST else min(self.target, self.found.longest)
            missing = (tokens - self.found.tokens) * self.session.bytes_per_token
        elif (self.grown or self.lengthened) and not self.validated:
            tokens = self.least if self.least > LEAST else min(self.target, PROBE_TOKENS)
            reserved = self.settings.reserved(tokens) + self.session.device.slack
            cache = self.settings.mapped(self.session.loaded.owned, tokens + PAGE_SIZE)
            grows = max(
                extrapolated(self.grown, self.settings.max_prefill_tokens),
                extrapolated(self.lengthened, tokens),
            )
            self.growth = round(grows * CAUTION)
            missing = self.growth + reserved + cache - self._free()
        elif self.session.device.gpu:
            return ()
        else:
            return (Offer(Knob(MEMORY_FIELD, Direction.RAISE)),)
        return self._raised(missing, tokens)

    def _raised(self, missing: int, tokens: int) -> tuple[Offer, ...]:
        """The container's memory, by so many missing bytes for so many tokens."""
        session = self.session
        if session.device.gpu:
            return ()
        now = session.device.limit
        rows = logprob_rows(now, session.loaded.vocabulary)
        limit = needed = now + max(0, missing)
        for _ in range(REPEATS):
            # More memory makes the chunks of the LM head larger, and what they take with them.
            larger = logprob_rows(limit, session.loaded.vocabulary) / rows - 1
            enough = needed + round(self.growth * larger)
            if enough <= limit:
                break
            limit = enough
        limit += limit // NOISE
        return (Offer.of_memory(-(-limit // MIB) * session.executor.ranks, tokens),)

    def _gains_too_little(self, settings: EngineSettings, growth: int) -> bool:
        """Whether what these settings reserve less, and so many bytes of steps, cannot be enough:
        then nothing needs to be played."""
        if self.found is None:
            return False
        least = SHORTEST if settings.max_model_len != self.settings.max_model_len else self.least
        missing = (least + self.spare - self.found.tokens) * self.session.bytes_per_token
        owned, less = self.session.loaded.owned, self.settings.reserved() - settings.reserved()
        less += self.settings.mapped(owned) - settings.mapped(owned) + self._slots(settings)
        return less + growth < missing

    def _slots(self, settings: EngineSettings) -> int:
        """Bytes less of recurrent states under these settings."""
        slots = self.session.loaded.slots
        return slots.reserved - Slots.of(settings, slots.nbytes).reserved

    def _free(self) -> int:
        """Bytes of the rank with the least, beside the smallest cache."""
        usage = self.session.executor.usage()
        return min(each.limit - each.used - each.files for each in usage)

    def _play(self, settings: EngineSettings) -> int | None:
        """Tokens that these settings would leave; None where the time is over."""
        return self._try(settings)[0]

    def _try(self, settings: EngineSettings) -> tuple[int | None, Played | None]:
        """The same, and what its steps took, where all were played."""
        if self.session.clock() > self.ends:
            return None, None
        trial = replace(self.session, settings=settings)
        search = Search(trial)
        try:
            tokens = search.trial()
            if self.validated and tokens >= self.least:
                tokens = self._validate(trial, whole_pages(tokens * SAFE_PERCENT // 100))
        except (DeviceOutOfMemory, StepTooLong):
            return 0, None
        growth = max(rank.growth for rank in trial.measured.ranks)
        return tokens, Played(search.longest, growth)

    def _validate(self, trial: Session, tokens: int) -> int:
        """Plays the stress at the final size. -> tokens, 0 where they did not survive"""
        executor, measured, settings = self.session.executor, trial.measured, trial.settings
        try:
            trial.map(tokens)
            with executor.held(settings.reserved(tokens)):
                measured.rest()
                trial.run_stress(min(settings.wanted_len, tokens))
                lowest = measured.keep_lowest_free()
        finally:
            trial.map_probe()
        return tokens if lowest >= 0 or self.session.device.gpu else 0


def extrapolated(points: list[Point], to: int) -> float:
    """Bytes beyond the points that were played: in a line through the last and the first beside
    which the other figure was nearly the same, or through nothing at 0, and no less than was
    taken; 0 where nothing was played."""
    if not points:
        return 0.0
    last = points[-1]
    near = last.beside // NEAR
    first = next(point for point in points if abs(point.beside - last.beside) <= near)
    apart = last.at - first.at
    slope = (last.nbytes - first.nbytes) / apart if apart > 0 else last.nbytes / last.at
    return max(last.nbytes + slope * (to - last.at), *(point.nbytes for point in points))
