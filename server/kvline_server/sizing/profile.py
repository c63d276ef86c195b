"""The profile loop, which sizes and validates the KV cache before the server is ready.

Steps: 1 collectives, 2 load, 3 autotune, 4 probe, 5 stress, 6 measure, 7 map and validate at the
final size, 8 shrink and retry. They are the same on every device; step 1 is empty on one device,
and step 3 on a CPU. The loop runs on rank 0 alone and takes every decision from the figures of all
ranks, so they cannot disagree.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from kvline_contract import times
from kvline_contract.memory import COLLECTIVES
from kvline_contract.report import Attempt, Outcome, Result, Source, Stage, State
from kvline_server.engine.largest_steps import LargestSteps, MakeBatch
from kvline_server.errors import DeviceFailure, DeviceOutOfMemory, OutOfMemory
from kvline_server.kernels import tuning
from kvline_server.kernels.routing import Played
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.memory.parts import OwnedPart
from kvline_server.messages import Progress, SendProgress
from kvline_server.parallel.executor import Executor
from kvline_server.sizing.measure import Measurement
from kvline_server.sizing.record import AttemptStore, find_record, keep_record
from kvline_server.sizing.settings import EngineSettings

PROBE_PAGES = 64
PROBE_TOKENS = PROBE_PAGES * PAGE_SIZE
SHRINK_PERCENT = 95
MAX_TRIES = 4
STEP_TRIES = 3
NEIGHBOUR_PAUSE = 15.0  # seconds
# Of a mixture of experts, with the words of a stage's detail.
ROUTINGS = (
    (Played.UNEQUAL, "every row to the same experts"),
    (Played.EVEN, "rows to all experts alike"),
)
PLAIN = ((Played.NOTHING, ""),)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of step 2: a model on the devices and empty arenas."""

    executor: Executor
    vocabulary: int
    # On every rank, loaded or of each token.
    owned: tuple[OwnedPart, ...]
    fingerprint: str
    cache_dtype: str
    experts: bool = False  # whether the model has a mixture of them

    @property
    def bytes_per_token(self) -> int:
        return sum(part.per_token for part in self.owned)

    def on(self, executor: Executor, collectives: int) -> Loaded:
        """The same on all ranks of an executor, whose exchange takes so many bytes of each."""
        part = OwnedPart(COLLECTIVES, fixed=collectives)
        return replace(self, executor=executor, owned=(*self.owned, part))


class ProfileLoop:
    def __init__(
        self,
        device: Device,
        settings: EngineSettings,
        loaded: Loaded,
        send: SendProgress,
        store: AttemptStore,
        record_file: Path | None,
        wait_for_neighbours: Callable[[], None],
        free_before_weights: tuple[int, ...],  # of each rank, before collectives too
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = device  # of rank 0, for what is the same on all
        self.settings = settings
        self.loaded = loaded
        self.executor = loaded.executor
        self.send = send
        self.store = store
        self.wait_for_neighbours = wait_for_neighbours
        self.free_mib = min(free_before_weights) // MIB
        self.pause = pause
        self.folder = store.path.parent  # outlives the container
        self.record = find_record(record_file, self.folder, loaded.fingerprint, self.free_mib)
        self.choices: Choices = {}
        self.longest = 0  # tokens of the longest sequence of the newest probe
        self.halvings = 0  # of what could fit, since a probe with the model's own context did not
        self.measured = Measurement(
            self.executor, device, settings, loaded.owned, free_before_weights
        )

    def run(self, started: float) -> Result:
        """Steps 3 to 8. `started` is the monotonic time at which loading began."""
        self.store.open(self.loaded.fingerprint, self.device.gpu)
        self._autotune()
        self.wait_for_neighbours()
        self._capture()
        target, source = self._target()
        self._fit(target, may_shrink=source is not Source.PINNED)
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
        with self._stage("autotune", State.AUTOTUNING) as details:
            try:
                choices = self.executor.tune(self.settings.max_prefill_tokens, known)
            except DeviceOutOfMemory as error:
                raise self._out_of_memory(error, ()) from error
            if choices is None:
                details.append("nothing to tune on this device")
                return
            self.executor.settle()
            if known is None:
                tuning.write(file, key, choices)
            self.choices = choices
            details.append(f"GEMM shapes with a kernel by trial: {len(choices)}, {how}")

    def _capture(self) -> None:
        """Captures graphs once, before sizing: they stay valid when the arena is resized."""
        started = time.monotonic()
        try:
            self.executor.resize(PROBE_PAGES)
            before = self.measured.used()
            self._warm_up_row_counts()
            captured = self.executor.capture(
                self.settings.max_prefill_tokens, self.settings.wanted_len
            )
        except DeviceOutOfMemory as error:
            raise self._out_of_memory(error, ()) from error
        if captured:
            self.executor.settle()  # or what the capture leaves in the allocator's cache counts
            self.measured.count_graphs(before)
            ms = round((time.monotonic() - started) * 1000)
            self.send(Progress(stage=Stage("graphs", ms, self.measured.ranks[0].graphs)))

    def _warm_up_row_counts(self) -> None:
        """Runs each row count once before memory is measured, because kernels allocate memory at
        the first step of a row count."""
        started, before = time.monotonic(), self.device.used()
        if counts := self.executor.warm_up(self.settings.max_prefill_tokens):
            self.executor.settle()
            ms, taken = round((time.monotonic() - started) * 1000), self.device.used() - before
            self.send(
                Progress(stage=Stage("row counts", ms, max(0, taken), f"{counts} row counts"))
            )

    def _target(self) -> tuple[int, Source]:
        """The budget to validate first, in tokens, and its source."""
        pinned = self.settings.pinned_kv_tokens
        failed = self.store.attempts
        for attempt in failed:
            self.send(Progress(attempt=attempt))
        if failed and failed[-1].number:
            if pinned is not None or failed[-1].number >= MAX_TRIES:
                self.store.clear()  # who fixes the cause outside needs no new state folder
                raise self.measured.binding().out_of_memory(failed, pinned is not None)
            return self._check_context(shrink(failed[-1].target_tokens)), Source.MEASURED
        # One kill while probing may be a node's restart, and more a model's own context too long.
        bounded = self.settings.max_model_len is None and self.settings.wanted_len > PROBE_TOKENS
        self.halvings = len(failed) if bounded else 0
        if len(failed) > (MAX_TRIES if bounded else 1):
            self.store.clear()
            raise self.measured.binding().killed_while_probing(failed)
        if pinned is not None:
            return self._check_context(whole_pages(pinned)), Source.PINNED
        if self.record is not None:
            return self._check_context(whole_pages(self.record.kv_tokens)), Source.RECORDED
        return self._search(), Source.MEASURED

    def _search(self) -> int:
        """Steps 4 to 6. Where the spec leaves the context to the model, and fewer tokens than that
        fit, the context is as long as they are: it is sought by what two probes leave."""
        longest = self._run_probe(self.settings.wanted_len)
        tokens = self._measure()
        if self.settings.max_model_len is None and (tokens < longest or self.halvings):
            shorter = max(tokens if tokens < longest else longest // 2, PROBE_TOKENS)
            if shorter < longest:
                self.executor.settle()
                self.measured.forget_growth()
                self._run_probe(shorter)
                more = self._measure()
                tokens = between((longest, tokens), (shorter, more), self.settings.wanted_len)
        if tokens < PAGE_SIZE * 2:
            raise self.measured.binding().nothing_left(tokens)
        return self._check_context(tokens)

    def _run_probe(self, context: int) -> int:
        """Attempt 0: the stress set on the smallest cache, with contexts of so many tokens, or of
        as many as could fit: -> how many that were. Repeated where other processes took the
        GPU's memory meanwhile, and once in any case: they may be gone when they are counted; and
        with half the context where the model's own is too long."""
        tries = 0
        while True:
            self.send(Progress(attempt=self.store.begin(0, PROBE_TOKENS)))
            try:
                self._probe()
                longest = self._stress(context)
                break
            except DeviceOutOfMemory as error:
                self.measured.count_arrived()
                displaced = self.measured.displaced
                again = displaced or (self.device.gpu and tries == 0)
                tries += 1
                if again and tries < MAX_TRIES:
                    self.pause(NEIGHBOUR_PAUSE if displaced else 0.0)
                elif self.settings.max_model_len is None and self.longest > PROBE_TOKENS:
                    self.halvings += 1
                else:
                    done = self.store.end(Outcome.OUT_OF_MEMORY, None)
                    raise self._out_of_memory(error, (done,)) from error
                self.store.forget()
            except DeviceFailure:
                self.store.forget()
                raise
        self.send(Progress(attempt=self.store.end(Outcome.SURVIVED, self._lowest_free())))
        return longest

    def _probe(self) -> None:
        """Step 4: maps a few pages, which page tables repeat during the stress."""
        with self._stage("probe", State.PROBING, f"{PROBE_PAGES} pages"):
            self.executor.settle()
            self.executor.resize(PROBE_PAGES)

    def _stress(self, context: int) -> int:
        """Step 5: runs the stress set on aliased pages and measures the peak. Its sequences have no
        more tokens than the memory could hold if they took none beside the KV cache: longer ones
        never come, and to build them took gigabytes of the host. -> tokens of the longest"""
        self.send(Progress(state=State.STRESSING))
        self.measured.rest()
        most = max(whole_pages(self._tokens() >> self.halvings), PROBE_TOKENS)
        if self.settings.max_model_len is not None:
            most = max(most, context)  # asked for: what it takes is measured, if it fits or not
        self.longest = min(context, most)
        self._run_stress(self.longest, aliased=most)
        return self.longest

    def _measure(self) -> int:
        """Step 6: the budget in tokens, in whole pages: the least of all ranks'. Waits and measures
        again while other processes hold the memory, such as a server that starts beside this one.
        """
        enough = self.settings.max_model_len or PAGE_SIZE * 2
        for _ in range(MAX_TRIES):
            tokens = self._left()
            if tokens >= enough or not self.measured.displaced:
                break
            self.pause(NEIGHBOUR_PAUSE)
        return tokens

    def _left(self) -> int:
        """Tokens that fit every rank now."""
        with self._stage("measure", None):
            self.measured.count_growth()
            self.measured.count_arrived()
            return self._tokens()

    def _tokens(self) -> int:
        """That fit every rank beside the peak since `rest`."""
        smallest = min(self.measured.budgets(self.settings.reserved() + self.device.slack))
        # One page more is the dummy's, which holds no token of anybody.
        token = self.loaded.bytes_per_token + self.settings.client_bytes_per_token
        return (smallest // token // PAGE_SIZE - 1) * PAGE_SIZE

    def _check_context(self, tokens: int) -> int:
        asked = self.settings.max_model_len
        if asked is not None and tokens < asked:
            raise self.measured.binding().context_does_not_fit(tokens, asked)
        return tokens

    def _fit(self, target: int, may_shrink: bool) -> None:
        number = self.store.attempts[-1].number + 1 if self.store.attempts else 1
        while True:
            self.send(Progress(attempt=self.store.begin(number, target)))
            try:
                self._validate(target)
            except DeviceOutOfMemory as error:
                self.send(Progress(attempt=self.store.end(Outcome.OUT_OF_MEMORY, None)))
                if not may_shrink or number >= MAX_TRIES:
                    pinned = not may_shrink
                    raise self._out_of_memory(error, self.store.attempts, pinned) from error
                why = f"{target} tokens did not fit: {str(error)[:160]}"
                with self._stage("shrink", State.SHRUNK_RETRY, why):
                    target = self._check_context(self._smaller(target))
                number += 1
            except DeviceFailure:
                self.store.forget()
                raise
            else:
                self.send(Progress(attempt=self.store.end(Outcome.SURVIVED, self._lowest_free())))
                return

    def _smaller(self, target: int) -> int:
        """The next size: five percent less, or less by what others took since the measurement,
        such as a second server that started beside this one, once it has been waited for."""
        known = self.measured.arrived()
        self.executor.settle()
        self.measured.count_arrived()
        if not self.measured.taken_since(known):
            return shrink(target)
        self.executor.resize(PROBE_PAGES)
        self.pause(NEIGHBOUR_PAUSE)
        self.measured.count_arrived()
        taken = self.measured.taken_since(known)
        if not taken:
            return target
        fewer = taken // self.loaded.bytes_per_token + PAGE_SIZE
        return max(PAGE_SIZE, min(shrink(target), whole_pages(target - fewer)))

    def _out_of_memory(
        self, error: DeviceOutOfMemory, attempts: tuple[Attempt, ...], pinned: bool = False
    ) -> OutOfMemory:
        """Of the rank that failed."""
        self.measured.count_arrived()
        return self.measured.ranks[error.rank].out_of_memory(attempts, pinned)

    def _validate(self, tokens: int) -> None:
        """Step 7: the whole stress set at the final size, with all that is reserved allocated."""
        self.send(Progress(state=State.VALIDATING))
        with self._stage("map", None, f"{tokens} tokens"):
            self.executor.resize(pages_for(tokens) + 1)
        self.send(Progress(effective=self.settings.effective(self._model_len(tokens))))
        with self.executor.held(self.settings.reserved(tokens)):
            self.measured.rest()
            self._run_stress(self._model_len(tokens))
            # A start from a record, or with a pinned size, has no other measurement of it.
            self.measured.count_growth()
            # Read while the canary is held: what is free now is free beyond what is reserved.
            lowest = self.measured.keep_lowest_free()
        if lowest < 0 and not self.device.gpu:  # on a GPU the allocation itself fails
            rank = self.measured.scarcest()
            raise DeviceOutOfMemory(f"{-lowest // MIB} MiB of what is reserved were used", rank)

    def _model_len(self, tokens: int) -> int:
        return min(self.settings.wanted_len, tokens)

    def _lowest_free(self) -> int:
        return min(self.measured.free_at_peak()) // MIB

    def _run_stress(self, max_model_len: int, aliased: int = 0) -> None:
        """With several ranks each runs a step alone before they run it together: one that lacks
        memory is known before another waits for it."""
        settings = self.settings
        stress = LargestSteps(
            max_running_requests=settings.max_running_requests,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_top_logprobs=settings.max_top_logprobs,
            max_model_len=max_model_len,
            vocabulary=self.loaded.vocabulary,
            pages=self.executor.pages,
            aliased=aliased,
            short_chunks=self.device.gpu,
        )
        for name, steps in itertools.groupby(stress.makers(), key=itemgetter(0)):
            makers = [make for _, make in steps]
            with self._stage(f"{'stress' if aliased else 'validate'} {name}", None) as details:
                for routing, what in ROUTINGS if self.loaded.experts else PLAIN:
                    details += self._run_steps(makers, routing, what)

    def _run_steps(self, makers: list[MakeBatch], routing: Played, what: str) -> list[str]:
        """-> details for their stage"""
        times = [self._run_step(make, routing) for make in makers]
        alone, whole = (round(sum(each) * 1000) for each in zip(*times, strict=True))
        details = [f"{what} {whole} ms"] if what else []
        if (ranks := self.executor.ranks) > 1:
            details.append(f"each of {ranks} ranks alone {alone} ms, then together")
        return details

    def _run_step(self, make: MakeBatch, routing: Played) -> tuple[float, float]:
        """Once more while its peak is not known (Device.keep_peak). -> seconds that every rank
        alone took, and in all"""
        for again in range(STEP_TRIES - 1, -1, -1):
            batch, started = make(routing), time.monotonic()
            if self.executor.ranks > 1:
                self.executor.rehearse(batch.step)
            alone = time.monotonic() - started
            self.executor.launch(batch.step).wait()
            whole = time.monotonic() - started
            if self.executor.keep_peak(again > 0):
                break
        return alone, whole

    @contextmanager
    def _stage(self, name: str, state: State | None, *details: str) -> Iterator[list[str]]:
        """Reports a stage with its time and the memory that it left on rank 0. The caller may add
        details to the list that it yields."""
        if state is not None:
            self.send(Progress(state=state))
        before, start, texts = self.device.now(), time.monotonic(), list(details)
        yield texts
        ms = round((time.monotonic() - start) * 1000)
        self.send(
            Progress(stage=Stage(name, ms, self.device.now() - before, ", ".join(texts) or None))
        )

    def _result(self, source: Source, started: float) -> Result:
        record = self.record if source is Source.RECORDED else None
        tokens = (self.executor.pages - 1) * PAGE_SIZE
        loop_ms = round((time.monotonic() - started) * 1000)
        return Result(
            kv_tokens=tokens,
            bytes_per_token=self.loaded.bytes_per_token,
            source=source,
            fingerprint=self.loaded.fingerprint,
            free_mib=max(0, self.free_mib),
            loop_ms=loop_ms,
            saved_ms=max(0, record.loop_ms - loop_ms) if record is not None else 0,
            measured_at=times.now(),
            ranks=self.measured.memory(self.settings.headroom_mib * MIB),
            gemm_kernels=tuning.texts(self.choices),
            cache_dtype=self.loaded.cache_dtype,
        )


def between(long: tuple[int, int], short: tuple[int, int], wanted: int) -> int:
    """Tokens that fit beside contexts as long as they are, or of `wanted` tokens if that is less.
    Each probe is a context and the tokens that it left: what it takes grows with the context."""
    (length, few), (shorter, more) = long, short
    if more <= few:
        return more
    slope = (more - few) / (length - shorter)
    context = min((more + slope * shorter) / (1 + slope), float(wanted))
    return whole_pages(int(more - slope * (context - shorter)))


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE


def shrink(tokens: int) -> int:
    """Five percent less, in whole pages."""
    return max(PAGE_SIZE, whole_pages(tokens * SHRINK_PERCENT // 100))
