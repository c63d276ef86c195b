"""The profile loop, which sizes and validates the KV cache before the server is ready.

Steps: 1 collectives, 2 load, 3 autotune, 4 probe, 5 stress, 6 measure, 7 map and validate at the
final size, 8 shrink and retry. They are the same on every device; step 1 is empty on one device,
and step 3 on a CPU. The loop runs on rank 0 alone and takes every decision from the figures of all
ranks, so they cannot disagree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvline_contract import times
from kvline_contract.progress import WAITS_FOR_HTTP
from kvline_contract.report import Attempt, Outcome, Result, Source, Stage, State
from kvline_server.errors import DeviceFailure, DeviceOutOfMemory, OutOfMemory, StepTooLong
from kvline_server.ipc.messages import Progress, SendProgress
from kvline_server.kernels import tuning
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.options.timeouts import LONGEST_STEP
from kvline_server.sizing.advice import Adviser, Found
from kvline_server.sizing.diagnosis import Diagnosis
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.offers import PIN_FIELD, PREFILL_FIELD, Offer
from kvline_server.sizing.record import AttemptStore, find_record, keep_record
from kvline_server.sizing.search import Search
from kvline_server.sizing.session import (
    MAX_TRIES,
    NEIGHBOUR_PAUSE,
    PROBE_PAGES,
    PROBE_TOKENS,
    Session,
    whole_pages,
)
from kvline_server.sizing.settings import EngineSettings

SHRINK_PERCENT = 95
FEW_KILLS = 2  # after which one more, by advice that is played, does not hide the diagnosis


class ProfileLoop:
    def __init__(
        self,
        device: Device,
        settings: EngineSettings,
        loaded: Loaded,
        send: SendProgress,
        store: AttemptStore,
        record_file: Path | None,
        wait_for_neighbours: Callable[[], object],
        free_before_weights: tuple[int, ...],  # of each rank, before collectives too
        pause: Callable[[float], None] = time.sleep,
        longest_step: float = LONGEST_STEP,  # seconds
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = Session(
            device, settings, loaded, send, store, pause, free_before_weights, longest_step, clock
        )
        self.device = device
        self.settings = settings
        self.loaded = loaded
        self.executor = loaded.executor
        self.send = send
        self.store = store
        self.measured = self.session.measured
        self.wait_for_neighbours = wait_for_neighbours
        self.folder = store.path.parent  # outlives the container
        self.record = find_record(
            record_file, self.folder, loaded.fingerprint, self.session.free_mib
        )
        self.choices: Choices = {}

    def run(self, started: float) -> Result:
        """Steps 3 to 8. `started` is the monotonic time at which loading began."""
        self.store.open(self.loaded.fingerprint, self.device.gpu)
        if self.record is not None:
            self.session.expected = started + self.record.loop_ms / 1000
        self._autotune()
        self.session.at(WAITS_FOR_HTTP)
        self.wait_for_neighbours()
        self._capture()
        target, source = self._target()
        source = self._fit(target, source)
        result = self._result(source, started)
        if (warning := self.measured.crowded(result)) is not None:
            self.send(Progress(warning=warning))
        self.store.clear()
        keep_record(self.folder, result)
        return result

    def _autotune(self) -> None:
        """Step 3, before any cache is mapped. Out of memory here is an error: skipping a kernel
        would make the server slower without notice."""
        file, key = self.folder / "tuning.json", self.loaded.fingerprint
        known, how = tuning.known(file, key, self.record.gemm_kernels if self.record else ())
        tries = self.executor.tunes and not known
        state = State.AUTOTUNING if tries else State.PROBING
        self.session.begin(2, "warms up its kernels", state)
        if not self.executor.tunes:
            return
        self.session.at("autotune")
        with self.session.stage("autotune") as details:
            try:
                choices = self.executor.tune(self.settings.max_prefill_tokens, known)
            except DeviceOutOfMemory as error:
                raise self._untried(error, "kernels could not be tried") from error
            assert choices is not None, "there is something to tune"
            self.executor.settle()
            if known is None:
                tuning.write(file, key, choices)
            self.choices = choices
            details.append(f"GEMM shapes with a kernel by trial: {len(choices)}, {how}")

    def _capture(self) -> None:
        """Captures graphs once, before sizing: they stay valid when the arena is resized."""
        started = self.session.clock()
        try:
            self.session.map_probe()
        except DeviceOutOfMemory as error:
            raise self._untried(error, f"{PROBE_PAGES} pages did not fit", steps=False) from error
        try:
            before = self.measured.used()
            self.session.at("row counts")
            self._warm_up_row_counts()
            self.session.at("graphs" if self.device.gpu else None)
            captured = self.executor.capture(
                self.settings.max_prefill_tokens, self.settings.wanted_len
            )
        except DeviceOutOfMemory as error:
            raise self._untried(error, "graphs could not be captured") from error
        if captured:
            self.executor.settle()  # or what the capture leaves in the allocator's cache counts
            self.measured.count_graphs(before)
            ms = round((self.session.clock() - started) * 1000)
            self.send(Progress(stage=Stage("graphs", ms, self.measured.ranks[0].graphs)))

    def _warm_up_row_counts(self) -> None:
        """Runs each row count once before memory is measured, because kernels allocate memory at
        the first step of a row count."""
        started, before = self.session.clock(), self.device.used()
        if counts := self.executor.warm_up(self.settings.max_prefill_tokens):
            self.executor.settle()
            ms, taken = round((self.session.clock() - started) * 1000), self.device.used() - before
            self.send(
                Progress(stage=Stage("row counts", ms, max(0, taken), f"{counts} row counts"))
            )

    def _target(self) -> tuple[int, Source]:
        """The budget to validate first, in tokens, and its source."""
        pinned = self.settings.pinned_kv_tokens
        failed = self.store.attempts
        for attempt in failed:
            self.send(Progress(attempt=attempt))
        # A record that failed was taken on another device, or beside fewer neighbours.
        sizes = [attempt for attempt in failed if attempt.number > self.store.recorded]
        probes = sum(a.target_tokens > 0 for a in failed if not a.number)
        if sizes or self.store.recorded:
            self._forget_record()
        if sizes:
            if pinned is not None or sizes[-1].number >= MAX_TRIES:
                error = self._no_size(self.measured.binding(), failed, pinned is not None)
                self.store.clear()  # who fixes the cause outside needs no new state folder
                raise error
            return self._checked(shrink(sizes[-1].target_tokens)), Source.MEASURED
        # One kill while probing may be a node's restart, and more a model's own context too long.
        bounded = self.settings.max_model_len is None and self.settings.wanted_len > PROBE_TOKENS
        if probes > (MAX_TRIES if bounded else 1):
            rank, adviser = self.measured.binding(), Adviser(self.session, None, killed=True)
            few = probes <= FEW_KILLS
            offers = self._advise(adviser, adviser.offers) if few else adviser.unplayed()
            self.store.clear()
            raise rank.killed_while_probing(failed, offers)
        if pinned is not None:
            return self._checked(whole_pages(pinned)), Source.PINNED
        if self.record is not None:
            return self._checked(self._recorded()), Source.RECORDED
        return self._search(probes if bounded else 0), Source.MEASURED

    def _forget_record(self) -> None:
        self.record = self.session.expected = None

    def _search(self, halvings: int = 0) -> int:
        """Steps 4 to 6. -> tokens to validate"""
        what = "measures the largest steps beside a small KV cache"
        self.session.begin(3, what, State.STRESSING)
        search = Search(self.session, halvings)
        try:
            tokens = search.run()
        except DeviceOutOfMemory as error:
            failure = self._out_of_memory(error, self.store.attempts[-1:])
            self.store.forget()  # for the next start only what has ended this process counts
            raise failure from error
        return self._checked(tokens, Found(search.left, search.longest))

    def _checked(self, tokens: int, found: Found | None = None) -> int:
        """Whether so many tokens are enough. Raises OutOfMemory or ContextDoesNotFit."""
        asked = self.settings.max_model_len
        if tokens >= max(asked or 0, 2 * PAGE_SIZE):
            return tokens
        rank = self.measured.binding()
        if found is not None and tokens < 2 * PAGE_SIZE:
            raise rank.nothing_left(tokens, self._offers(found))
        if asked is not None and tokens < asked:
            offers = self._offers(found or Found(tokens, asked))
            raise rank.context_does_not_fit(tokens, asked, offers)
        return tokens

    def _out_of_memory(
        self, error: DeviceOutOfMemory, attempts: tuple[Attempt, ...], pinned: bool = False
    ) -> OutOfMemory:
        """Of the rank that failed."""
        self.measured.count_arrived()
        return self._no_size(self.measured.ranks[error.rank], attempts, pinned)

    def _untried(self, error: DeviceOutOfMemory, what: str, steps: bool = True) -> OutOfMemory:
        """Before the stress. Where `steps` took the memory, smaller ones take less."""
        self.measured.count_arrived()
        lower = Adviser(self.session, None).unplayed() if steps else ()
        return self.measured.ranks[error.rank].untried(what, lower)

    def _no_size(self, rank: Diagnosis, attempts: tuple[Attempt, ...], pinned: bool) -> OutOfMemory:
        """No estimate was right here, so what is offered is validated."""
        sizes = any(a.number for a in attempts)
        kills = sum(a.outcome is Outcome.KILLED for a in attempts)
        adviser = Adviser(self.session, None, validated=sizes, killed=kills > 0)
        ask, spec_field = (adviser.pins, PIN_FIELD) if pinned else (adviser.offers, PREFILL_FIELD)
        if kills > FEW_KILLS:
            offers = adviser.unplayed(spec_field)
        else:
            offers = self._advise(adviser, ask, spec_field)
        return rank.out_of_memory(attempts, pinned, offers)

    def _offers(self, found: Found | None) -> tuple[Offer, ...]:
        adviser = Adviser(self.session, found)
        return self._advise(adviser, adviser.offers)

    def _advise(
        self,
        adviser: Adviser,
        ask: Callable[[], tuple[Offer, ...]],
        spec_field: str = PREFILL_FIELD,
    ) -> tuple[Offer, ...]:
        """Noted as an attempt for 0 tokens: where it is killed, the next start gives no advice that
        must be played."""
        kept = self.store.attempts
        if any(a.target_tokens == 0 for a in kept):
            return adviser.unplayed(spec_field)
        assert self.session.current is not None
        stage = self.session.current.stage
        self.session.begin(stage, "measures what smaller settings would leave: this start fails")
        trial = self.store.begin(0, 0)
        self.send(Progress(attempt=trial))
        offers = ask()
        self.store.put_back(kept)
        before = next((a for a in kept if not a.number), None)
        self.send(Progress(attempt=before or replace(trial, outcome=Outcome.SURVIVED)))
        return offers

    def _recorded(self) -> int:
        """Tokens of the record, and as many more as more is free now than was as it was taken, by
        much: other processes may have held memory then."""
        assert self.record is not None
        if not self.record.had_less_free_than(self.session.free_mib):
            return whole_pages(self.record.kv_tokens)
        more = (self.session.free_mib - self.record.free_mib) * MIB
        return whole_pages(self.record.kv_tokens + more // self.session.bytes_per_token)

    def _fit(self, target: int, source: Source) -> Source:
        """Steps 7 and 8. A recorded size that does not fit is searched for in its place, once.
        -> the source of the size that fits"""
        number = 1 + max((attempt.number for attempt in self.store.attempts), default=0)
        while True:
            recorded = source is Source.RECORDED
            self.send(Progress(attempt=self.store.begin(number, target, recorded)))
            attempt = f", attempt {number}" if number > 1 else ""
            what = f"validates {target} tokens with the largest steps{attempt}"
            self.session.begin(4, what, State.VALIDATING)
            try:
                self._validate(target)
            except DeviceOutOfMemory as error:
                self.send(Progress(attempt=self.store.end(Outcome.OUT_OF_MEMORY, None)))
                pinned = source is Source.PINNED
                if pinned or number >= MAX_TRIES:
                    raise self._out_of_memory(error, self.store.attempts, pinned) from error
                why = f"{target} tokens did not fit: {str(error)[:160]}"
                what = f"makes the KV cache smaller, as {target} tokens did not fit"
                self.session.begin(4, what, State.SHRUNK_RETRY)
                with self.session.stage("shrink", why):
                    smaller = self._smaller(target)
                if recorded:
                    self._forget_record()
                    source = Source.MEASURED
                    smaller = self._search()
                target = self._checked(smaller)
                number += 1
            except (DeviceFailure, StepTooLong):
                self.store.forget()
                raise
            else:
                done = self.store.end(Outcome.SURVIVED, self.session.lowest_free())
                self.send(Progress(attempt=done))
                return source

    def _smaller(self, target: int) -> int:
        """The next size: five percent less, or less by what others took since the measurement,
        such as a second server that started beside this one, once it has been waited for."""
        known = self.measured.arrived()
        self.executor.settle()
        self.measured.count_arrived()
        if not self.measured.taken_since(known):
            return shrink(target)
        self.session.map_probe()
        self.session.pause(NEIGHBOUR_PAUSE)
        self.measured.count_arrived()
        taken = self.measured.taken_since(known)
        if not taken:
            return target
        fewer = taken // self.loaded.bytes_per_token + PAGE_SIZE
        return max(PAGE_SIZE, min(shrink(target), whole_pages(target - fewer)))

    def _validate(self, tokens: int) -> None:
        """Step 7: the whole stress set at the final size, with all that is reserved allocated."""
        with self.session.stage("map", f"{tokens} tokens"):
            self.session.map(tokens)
        self.send(Progress(effective=self.settings.effective(self._model_len(tokens))))
        with self.executor.held(self.settings.reserved(tokens)):
            self.measured.rest()
            self.session.run_stress(self._model_len(tokens))
            # A start from a record, or with a pinned size, has no other measurement of it.
            self.measured.count_growth()
            # Read while the canary is held: what is free now is free beyond what is reserved.
            lowest = self.measured.keep_lowest_free()
        if lowest < 0 and not self.device.gpu:  # on a GPU the allocation itself fails
            rank = self.measured.scarcest()
            raise DeviceOutOfMemory(f"{-lowest // MIB} MiB of what is reserved were used", rank)

    def _model_len(self, tokens: int) -> int:
        return min(self.settings.wanted_len, tokens)

    def _result(self, source: Source, started: float) -> Result:
        record = self.record if source is Source.RECORDED else None
        sizes = self.session.sizes
        tokens = (self.executor.pages[0] - 1) * PAGE_SIZE
        loop_ms = round((self.session.clock() - started) * 1000)
        # A size that is smaller for what came since is a record of as much less.
        taken = self.measured.taken_since((0,) * self.executor.ranks) // MIB
        return Result(
            kv_tokens=tokens,
            bytes_per_token=self.loaded.bytes_per_token,
            full_bytes_per_token=sizes.full_bytes_per_token if self.loaded.windowed else None,
            sequence_tokens=sizes.sequence_tokens(self._model_len(tokens)),
            source=source,
            fingerprint=self.loaded.fingerprint,
            free_mib=max(0, self.session.free_mib - taken),
            loop_ms=loop_ms,
            saved_ms=max(0, record.loop_ms - loop_ms) if record is not None else 0,
            measured_at=times.now(),
            ranks=self.measured.memory(tokens, self.settings.headroom_mib * MIB),
            gemm_kernels=tuning.texts(self.choices),
            cache_dtype=self.loaded.cache_dtype,
            state_slots=self.loaded.slots.running or None,
            snapshots=self.loaded.slots.snapshots if self.loaded.slots.running else None,
            slot_bytes=self.loaded.slots.nbytes or None,
            state_dtype=self.loaded.slots.dtype if self.loaded.slots.running else None,
            bfloat16_slot_bytes=self.loaded.slots.in_bfloat16 or None,
        )


def shrink(tokens: int) -> int:
    """Five percent less, in whole pages."""
    return max(PAGE_SIZE, whole_pages(tokens * SHRINK_PERCENT // 100))
