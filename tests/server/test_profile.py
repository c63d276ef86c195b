"""The profile loop, step by step, on a simulated device."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import STRESS
from simulated import BYTES_PER_TOKEN, SETTINGS, Killed, Machine, Notes

from kvline_contract.memory import GRAPHS, KV_CACHE, WEIGHTS
from kvline_contract.report import Binding, Outcome, Result, Source, State
from kvline_server.engine.batch import Batch
from kvline_server.engine.stress.owners import StressSet
from kvline_server.errors import ContextDoesNotFit, DeviceOutOfMemory, OutOfMemory
from kvline_server.memory.device import MIB
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.profile import ProfileLoop
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.search import between
from kvline_server.sizing.settings import EngineSettings
from kvline_server.worker.step import Results, Step

FINGERPRINT = "f" * 32
PARTS = ("total", "weights", "activations", "graphs", "kv", "headroom", "others")
RECORDED_PARTS = [f"{part}MiB" for part in PARTS]


def machine(**changed: Any) -> Machine:
    return Machine(**({"limit": 256 * MIB, "weights": 100 * MIB, "price": 64 << 10} | changed))


class Start:
    """One start of a server in a folder that outlives it."""

    def __init__(self, made: Machine, folder: Path, wanted: EngineSettings = SETTINGS) -> None:
        self.machine, self.folder, self.wanted = made, folder, wanted
        self.notes = Notes()
        self.record: Path | None = None
        self.pause: Callable[[float], None] = time.sleep
        self.stress = made.stress

    def run(self, started: float = 0.0) -> Result:
        made = self.machine
        loaded = Loaded(made, 1000, made.owned, made.groups, self.stress, FINGERPRINT, "bfloat16")
        return ProfileLoop(
            device=made,
            settings=self.wanted,
            loaded=loaded,
            send=self.notes,
            store=AttemptStore(self.folder / "attempts.json"),
            record_file=self.record,
            wait_for_neighbours=lambda: None,
            free_before_weights=(made.limit,),
            pause=self.pause,
        ).run(started)

    @property
    def tried(self) -> list[int]:
        return [a.target_tokens for n, a in sorted(self.notes.attempts.items()) if n]


def test_all_that_is_left_becomes_cache_but_the_headroom(tmp_path: Path) -> None:
    start = Start(machine(), tmp_path)
    result = start.run()
    made = start.machine
    left = made.limit - made.used() - 128 * made.price - made.working_files()
    page = 16 * BYTES_PER_TOKEN
    assert 8 * MIB <= left < 8 * MIB + 2 * page
    assert (result.source, list(start.notes.attempts)) == (Source.MEASURED, [0, 1])
    # There is nothing to tune.
    assert start.notes.states == [State.PROBING, State.STRESSING, State.VALIDATING]
    assert "autotune" not in start.notes.stages
    memory = result.memory
    assert sum(part.mib for part in memory.parts) == memory.total_mib == 256
    assert memory.mib(KV_CACHE) == made.nbytes // MIB and memory.mib(WEIGHTS) == 100
    assert result.cache_dtype == "bfloat16"
    assert not (tmp_path / "attempts.json").exists()


def test_the_stress_set_is_that_of_the_settings(tmp_path: Path) -> None:
    """Of the model's length while probing, with pages that repeat; of the budget at its size."""
    start = Start(machine(), tmp_path)
    tokens = start.run().kv_tokens
    probed, validated = start.machine.steps[:STRESS], start.machine.steps[STRESS:]
    assert len(validated) == STRESS and tokens > SETTINGS.model_max_len
    for step in start.machine.steps:
        assert max(step.listed_top, step.scored_top) == SETTINGS.max_top_logprobs
        assert len(step.tokens) <= SETTINGS.max_prefill_tokens
        assert len(step.sampled_requests) <= SETTINGS.max_running_requests
    for steps in (probed, validated):
        *_, decode, kinds, mixed, plain = steps
        assert len(mixed.tokens) == len(plain.tokens) == SETTINGS.max_prefill_tokens
        assert len(decode.tokens) == len(kinds.tokens) == SETTINGS.max_running_requests
        assert decode.layout.groups[0].lengths.max() == SETTINGS.model_max_len
        assert (
            decode.sampling_metadata.top_k == 1000
        ).all() and not plain.sampling_metadata.top_k.any()
    tables = [steps[-4].layout.groups[0].pages for steps in (probed, validated)]
    once = [len(set(pages)) for pages in tables]
    assert once[0] < len(tables[0]) and once[1] == len(tables[1])


def test_the_sequences_of_a_step_live_until_its_results_are_read(tmp_path: Path) -> None:
    """As in service, and no longer: another step's would be measured beside them."""
    alive: list[int] = []

    def batches() -> int:
        gc.collect()
        return sum(type(each) is Batch for each in gc.get_objects())

    class Counting(Machine):
        def wait(self) -> Results:
            alive.append(batches() - before)
            return super().wait()

    made = Counting(limit=256 * MIB, weights=100 * MIB, price=64 << 10)
    before = batches()  # of other tests
    Start(made, tmp_path).run()
    assert alive == [1] * (2 * STRESS)


@pytest.mark.parametrize("context_price", [0, 1 << 10, 8 << 10, 64 << 10])
@pytest.mark.parametrize("model_max_len", [1024, 1 << 17])
def test_a_context_that_is_left_to_the_model_is_as_long_as_fits(
    tmp_path: Path, context_price: int, model_max_len: int
) -> None:
    """Starts that fit were refused: the probe played the model's own context, which never came."""
    made = machine(context_price=context_price)
    start = Start(made, tmp_path, replace(SETTINGS, model_max_len=model_max_len))
    result = start.run()
    assert result.source is Source.MEASURED
    context = min(model_max_len, result.kv_tokens)
    assert start.notes.lengths == [context]
    left = made.limit - made.used() - 128 * made.price - context * context_price
    left -= made.working_files() + 8 * MIB  # of headroom
    # Not a page is given away but one for what is rounded; the probes bound what they play.
    page = 16 * (BYTES_PER_TOKEN + context_price)
    assert 0 <= left < 3 * page
    most = (made.limit - made.weights) // BYTES_PER_TOKEN
    assert max(int(step.layout.groups[0].lengths.sum()) for step in made.steps) <= most


@pytest.mark.parametrize(
    ("long", "short", "wanted", "found"),
    [
        ((4000, 1600), (1600, 2800), 1 << 17, 2400),  # half a token for each of the context
        ((4000, 1600), (1600, 2800), 2000, 2592),  # the context ends before the memory does
        ((4000, 0), (1024, 0), 1 << 17, 0),
        ((4000, 1600), (1600, 1600), 1 << 17, 1600),  # the context takes nothing
    ],
)
def test_tokens_between_two_probes(
    long: tuple[int, int], short: tuple[int, int], wanted: int, found: int
) -> None:
    assert between(long, short, wanted) == found


@pytest.mark.parametrize("unknown", [1, 9])
def test_a_step_whose_peak_is_not_known_is_run_again_at_most_twice(
    tmp_path: Path, unknown: int
) -> None:
    class Reclaimed(Machine):
        asked: ClassVar[list[bool]] = []

        def keep_peak(self, again: bool) -> bool:
            self.asked.append(again)
            return len(self.asked) > unknown

    Reclaimed.asked.clear()
    plain = machine()
    Start(plain, tmp_path).run()
    made = Reclaimed(limit=plain.limit, weights=plain.weights, price=plain.price)
    Start(made, tmp_path).run()
    assert made.asked[:4] == (
        [True, True, True, True] if unknown == 1 else [True, True, False, True]
    )
    assert len(made.steps) - len(plain.steps) == (1 if unknown == 1 else 6)


@pytest.mark.parametrize("tiles", [False, True])
def test_a_last_chunk_is_always_validated_and_probed_where_it_may_take_more(
    tiles: bool, tmp_path: Path
) -> None:
    start = Start(machine(), tmp_path)
    start.stress = StressSet(tiles_context=tiles)
    start.run()
    played = [(now.stage, now.name) for now in start.notes.currents if now.name == "last-chunk"]
    assert played == ([(4, "last-chunk")] if tiles else [(3, "last-chunk"), (4, "last-chunk")])


def test_memory_that_an_owner_names_is_a_part_of_the_report(tmp_path: Path) -> None:
    def start(name: str, **changed: int) -> Start:
        (folder := tmp_path / name).mkdir()
        return Start(machine(**changed), folder)

    plain = start("plain").run()
    named = start("named", experts=70 * MIB).run()
    assert named.kv_tokens == plain.kv_tokens
    assert (named.memory.mib(WEIGHTS), named.memory.mib("experts")) == (30, 70)
    assert sum(part.mib for part in named.memory.parts) == named.memory.total_mib
    with pytest.raises(OutOfMemory, match="weights 30 MiB, experts 70 MiB") as caught:
        start("small", experts=70 * MIB, limit=104 * MIB).run()
    assert caught.value.memory is not None and caught.value.memory.mib("experts") == 70


def test_what_a_capture_leaves_in_the_allocator_s_cache_is_not_the_graphs(tmp_path: Path) -> None:
    """On an H200 802 of 2,166 MiB: half of what smaller graphs freed appeared as others."""
    memory = Start(machine(graphs=20 * MIB, gpu=True), tmp_path).run().memory
    assert memory.mib(GRAPHS) == 20


def test_kernels_are_tried_before_any_cache_is_mapped(tmp_path: Path) -> None:
    start = Start(machine(trial=100 * MIB), tmp_path)
    assert start.run().kv_tokens == Start(machine(), tmp_path).run().kv_tokens
    assert start.notes.stages["autotune"] == "GEMM shapes with a kernel by trial: 1, measured now"


def test_a_trial_that_does_not_fit_is_an_error_that_names_every_knob(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        Start(machine(trial=200 * MIB), tmp_path).run()
    assert "kernels could not be tried" in str(caught.value)
    assert {k.spec_field for k in caught.value.knobs} >= {"spec.engine.maxPrefillTokens"}


def test_a_size_that_does_not_survive_is_tried_again_five_percent_smaller(tmp_path: Path) -> None:
    start = Start(machine(surprise=10 * MIB), tmp_path)
    result = start.run()
    first, second, third = start.tried
    assert second == first * 95 // 100 // 16 * 16
    assert third == second * 95 // 100 // 16 * 16 == result.kv_tokens
    outcomes = [a.outcome for _, a in sorted(start.notes.attempts.items())]
    assert outcomes == [Outcome.SURVIVED, *[Outcome.OUT_OF_MEMORY] * 2, Outcome.SURVIVED]
    assert State.SHRUNK_RETRY in start.notes.states


def test_an_allocator_s_slack_saves_a_shrink(tmp_path: Path) -> None:
    """Seen on a GPU: measured to the last MiB, and 3 MiB more were needed at the final size."""
    tight = Start(machine(surprise=3 * MIB), tmp_path)
    assert tight.run() and len(tight.tried) == 2
    roomy = Start(machine(surprise=3 * MIB, slack=4 * MIB), tmp_path)
    assert roomy.run().kv_tokens > tight.tried[-1] and len(roomy.tried) == 1


class Overdrawn(Machine):
    """Lets the stress through, and is seen over its limit by `over` at the final size."""

    over = 9 * MIB

    def used(self) -> int:
        return super().used() + (self.over if self.taken and self.pages[0] > 3000 else 0)

    def _take(self, nbytes: int) -> None:
        self.highest = max(self.highest, super().used() + nbytes)


def test_an_attempt_that_needed_part_of_the_headroom_has_failed(tmp_path: Path) -> None:
    """A lowest free memory of -9 MiB was published as a size that survived."""
    start = Start(Overdrawn(limit=256 * MIB, weights=32 * MIB, price=64 << 10), tmp_path)
    start.run()
    attempts = [a for n, a in sorted(start.notes.attempts.items()) if n]
    assert [a.outcome for a in attempts] == [Outcome.OUT_OF_MEMORY, Outcome.SURVIVED]
    assert (attempts[-1].lowest_free_mib or 0) >= 0


class Shared(Machine):
    """A GPU of which another server holds a part, for a while."""

    others = 120 * MIB
    began = False

    def used(self) -> int:
        return super().used() + (self.others if self.began else 0)

    def now(self) -> int:
        return super().used() - self.nbytes

    def peak(self) -> int:
        return max(self.highest - self.nbytes, self.now())

    def reset_peak(self) -> None:
        self.began = True
        self.highest = super().used()

    def _take(self, nbytes: int) -> None:
        self.highest = max(self.highest, super().used() + nbytes)


def shared(folder: Path, leaves: bool) -> tuple[ProfileLoop, list[float], Notes]:
    made = Shared(limit=256 * MIB, weights=32 * MIB, price=1024, gpu=True)
    waits: list[float] = []
    notes = Notes()

    def pause(seconds: float) -> None:
        waits.append(seconds)
        made.others = 0 if leaves else made.others

    loop = ProfileLoop(
        device=made,
        settings=replace(SETTINGS, max_model_len=40_000, model_max_len=40_000),
        loaded=Loaded(made, 1000, made.owned, made.groups, made.stress, FINGERPRINT, "bfloat16"),
        send=notes,
        store=AttemptStore(folder / "attempts.json"),
        record_file=None,
        wait_for_neighbours=lambda: None,
        free_before_weights=(made.limit,),
        pause=pause,
    )
    return loop, waits, notes


def test_a_start_waits_for_one_beside_it_and_names_it_when_it_stays(tmp_path: Path) -> None:
    """Two starts at once on one GPU: the error of one did not name the other."""
    loop, waits, _ = shared(tmp_path, leaves=True)
    assert loop.run(0.0).kv_tokens >= 40_000
    assert len(waits) == 1
    loop, waits, _ = shared(tmp_path, leaves=False)
    with pytest.raises(ContextDoesNotFit, match="120 MiB of it taken since this start") as caught:
        loop.run(0.0)
    assert caught.value.termination().binding is Binding.NEIGHBOURS
    assert len(waits) == 4


class Twin(Shared):
    """Another start beside this one maps its cache when we map ours: after our measurement."""

    others, mapped = 0, False

    def resize(self, pages: tuple[int, ...]) -> None:
        if pages > (1000,) and not self.mapped:
            self.others, self.mapped = 400 * MIB, True
        super().resize(pages)

    def _take(self, nbytes: int) -> None:
        if self.used() + nbytes + self.working_files() > self.limit:
            raise DeviceOutOfMemory("simulated")
        super()._take(nbytes)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_size_that_another_start_took_is_tried_again_or_is_smaller_by_what_it_took(
    tmp_path: Path, leaves: bool
) -> None:
    made = Twin(limit=1024 * MIB, weights=100 * MIB, price=64 << 10, gpu=True)
    start = Start(made, tmp_path)
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if leaves:
            made.others = 0

    start.pause = pause
    result = start.run()
    assert len(waits) == 1
    first, second = start.tried
    assert result.kv_tokens == second
    if leaves:
        assert second == first
    else:
        assert first - second >= 400 * MIB // BYTES_PER_TOKEN
        assert result.free_mib == 1024 - 400, "its record is of a GPU with a neighbour"


class Probed(Twin):
    """Another start maps its cache while this one plays its stress on the smallest."""

    before = 2  # batches until then

    def launch(self, step: Step) -> Machine:
        self.before -= 1
        if not self.before:
            self.others, self.mapped = 1000 * MIB, True
        return super().launch(step)

    def _take(self, nbytes: int) -> None:
        try:
            super()._take(nbytes)
        except DeviceOutOfMemory:
            self.others = 0 if self.gone else self.others
            raise

    gone = False  # as soon as it has filled the GPU: it ended


@pytest.mark.parametrize("leaves", ["at once", "later", "never"])
def test_a_probe_beside_a_start_that_fills_the_gpu_is_tried_again_or_names_it(
    tmp_path: Path, leaves: str
) -> None:
    made = Probed(limit=1024 * MIB, weights=20 * MIB, price=64 << 10, gpu=True)
    made.gone = leaves == "at once"
    start = Start(made, tmp_path)
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        made.others = 0 if leaves == "later" else made.others

    start.pause = pause
    if leaves == "never":
        with pytest.raises(OutOfMemory, match="1000 MiB of it taken since this start") as caught:
            start.run()
        assert caught.value.termination().binding is Binding.NEIGHBOURS
        assert len(waits) == 3 and all(waits)
        return
    assert start.run().kv_tokens > 100_000
    assert waits == [0.0 if made.gone else 15.0]
    assert start.notes.attempts[0].outcome is Outcome.SURVIVED


def test_after_four_sizes_the_failure_names_parts_and_knobs(tmp_path: Path) -> None:
    start = Start(machine(surprise=100 * MIB), tmp_path)
    with pytest.raises(OutOfMemory) as caught:
        start.run()
    assert len(start.tried) == 4
    termination = caught.value.termination()
    assert termination.memory is not None and termination.memory.weights_mib == 100
    # No smaller step helps: what was taken too much is not a step's.
    assert [k.spec_field for k in termination.knobs] == ["spec.resources.memory"]
    for tokens in start.tried:
        assert str(tokens) in termination.message


def test_a_pin_is_validated_and_never_changed(tmp_path: Path) -> None:
    pinned = replace(SETTINGS, pinned_kv_tokens=4096)
    start = Start(machine(), tmp_path, pinned)
    result = start.run()
    assert (result.kv_tokens, result.source) == (4096, Source.PINNED)
    assert State.STRESSING not in start.notes.states  # no search
    too_much = Start(machine(), tmp_path, replace(SETTINGS, pinned_kv_tokens=60_000))
    with pytest.raises(OutOfMemory, match=r"spec\.capacity\.kvTokens pins 60000"):
        too_much.run()
    assert too_much.tried == [60_000]


@pytest.mark.parametrize("scratch", [0, 40 * MIB])
def test_a_record_of_a_twin_skips_the_search_not_the_validation(
    tmp_path: Path, scratch: int
) -> None:
    """Memory that the warm-up of row counts leaves is freed first: a start from a record must not
    begin with more memory in use than the search had."""
    other = tmp_path / "other"
    other.mkdir()
    found = Start(machine(scratch=scratch, trial=MIB), other).run()
    assert found.gemm_kernels == ("128 64 32 1",)
    record = {
        "kvTokens": found.kv_tokens,
        "freeMiB": 256,
        "loopMs": 10**9,
        "measuredAt": "2026-11-21T10:00:00Z",
        "gemmKernels": list(found.gemm_kernels),
        "memory": dict.fromkeys(RECORDED_PARTS, 0),
    }
    file = tmp_path / "records.json"
    file.write_text(json.dumps({"version": 1, "reuse": "Auto", "records": {FINGERPRINT: record}}))
    start = Start(machine(scratch=scratch, trial=MIB), tmp_path)
    start.record = file
    again = start.run()
    assert "recorded by an identical replica" in str(start.notes.stages["autotune"])
    assert again.gemm_kernels == found.gemm_kernels
    assert (again.kv_tokens, again.source) == (found.kv_tokens, Source.RECORDED)
    assert again.saved_ms > 0
    assert again.memory == found.memory  # activations too, which counted as others
    assert State.STRESSING not in start.notes.states
    assert State.VALIDATING in start.notes.states


def from_record(folder: Path, tokens: int, free_mib: int, made: Machine) -> Start:
    """A start that finds a record of so many tokens, taken with so much memory free."""
    folder.mkdir(exist_ok=True)
    record = {
        "kvTokens": tokens,
        "freeMiB": free_mib,
        "loopMs": 10**9,
        "measuredAt": "2026-11-21T10:00:00Z",
        "memory": dict.fromkeys(RECORDED_PARTS, 0),
    }
    file = folder / "records.json"
    file.write_text(json.dumps({"version": 1, "reuse": "Auto", "records": {FINGERPRINT: record}}))
    start = Start(made, folder)
    start.record = file
    return start


def test_a_recorded_size_that_does_not_fit_is_searched_for_in_the_same_start(
    tmp_path: Path,
) -> None:
    """Five of five starts shrank it in vain, where a search found a size."""
    found = Start(machine(), tmp_path).run()
    start = from_record(tmp_path / "a", 2 * found.kv_tokens, 256, machine())
    result = start.run()
    assert (result.kv_tokens, result.source) == (found.kv_tokens, Source.MEASURED)
    outcomes = {n: a.outcome for n, a in start.notes.attempts.items()}
    assert outcomes == {
        0: Outcome.SURVIVED,
        1: Outcome.OUT_OF_MEMORY,
        2: Outcome.SURVIVED,
    }


def test_what_a_pod_found_in_place_of_a_record_is_its_next_start_s(tmp_path: Path) -> None:
    """The shared record was played again at each start, and failed."""
    folder = tmp_path / "a"
    found = from_record(folder, 60_000, 256, machine()).run()
    again = from_record(folder, 60_000, 256, machine())
    result = again.run()
    assert (result.kv_tokens, result.source) == (found.kv_tokens, Source.RECORDED)
    assert again.tried == [found.kv_tokens]
    newer = json.loads((folder / "records.json").read_text())
    newer["records"][FINGERPRINT] |= {"kvTokens": 16_000, "measuredAt": "2100-01-01T00:00:00Z"}
    again.record = folder / "newer.json"
    again.record.write_text(json.dumps(newer))
    assert again.run().kv_tokens == 16_000


def test_a_recorded_size_that_was_killed_is_searched_for_in_the_next_start(tmp_path: Path) -> None:
    found = Start(machine(), tmp_path).run()
    with pytest.raises(Killed):
        from_record(tmp_path / "a", 2 * found.kv_tokens, 256, machine(kills=True)).run()
    again = from_record(tmp_path / "a", 2 * found.kv_tokens, 256, machine(kills=True))
    result = again.run()
    assert (result.kv_tokens, result.source) == (found.kv_tokens, Source.MEASURED)
    assert again.tried == [2 * found.kv_tokens, found.kv_tokens]


def test_a_size_searched_for_after_a_record_was_killed_shrinks_as_any_other(tmp_path: Path) -> None:
    """While the record was among the failed sizes, each start searched anew: four times the same
    size, and then no start at all."""

    def made() -> Machine:
        return machine(surprise=10 * MIB, kills=True)

    def last(start: Start) -> int:
        with pytest.raises(Killed):
            start.run()
        return start.tried[-1]

    plain = tmp_path / "plain"
    plain.mkdir()
    sizes = [last(Start(made(), plain)) for _ in range(2)]
    smallest = Start(made(), plain).run().kv_tokens
    folder, record = tmp_path / "a", 2 * sizes[0]
    assert [last(from_record(folder, record, 256, made())) for _ in range(3)] == [record, *sizes]
    result = from_record(folder, record, 256, made()).run()
    assert (result.kv_tokens, result.source) == (smallest, Source.MEASURED)


@pytest.mark.parametrize("free", [255, 256, 257])
def test_a_killed_record_is_known_with_another_free_memory_at_the_restart(
    tmp_path: Path, free: int
) -> None:
    """It had grown by what was free, so one MiB more was another size, and the start shrank it."""

    def made(mib: int) -> Machine:
        return machine(limit=mib * MIB, kills=True)

    with pytest.raises(Killed):
        from_record(tmp_path / "a", 60_000, 200, made(256)).run()
    again = from_record(tmp_path / "a", 60_000, 200, made(free))
    result = again.run()
    plain = Start(made(free), tmp_path).run()
    assert (result.kv_tokens, result.source) == (plain.kv_tokens, Source.MEASURED)
    assert len(again.tried) == 2


def test_a_record_whose_start_was_stopped_is_tried_again(tmp_path: Path) -> None:
    tokens = Start(machine(), tmp_path).run().kv_tokens
    with pytest.raises(Killed):
        from_record(tmp_path / "a", 2 * tokens, 256, machine(kills=True)).run()
    AttemptStore(tmp_path / "a" / "attempts.json").interrupt()
    again = from_record(tmp_path / "a", tokens, 256, machine())
    assert again.run().source is Source.RECORDED


def test_the_time_of_a_record_that_failed_is_not_that_of_the_search(tmp_path: Path) -> None:
    start = from_record(tmp_path / "a", 60_000, 256, machine())  # which took eleven days
    start.run(time.monotonic())
    tomorrow = str(datetime.now(UTC) + timedelta(days=1)).replace(" ", "T")
    recorded = [each.stage for each in start.notes.currents if (each.ready_at or "") > tomorrow]
    assert {2, 4} <= set(recorded) and 3 not in recorded


def test_a_record_taken_beside_a_neighbour_grows_by_what_is_free_now(tmp_path: Path) -> None:
    """Its size was used on an empty device for ever: 8,752 tokens of 35,056."""
    found = Start(machine(), tmp_path).run()
    held = 64 * MIB // BYTES_PER_TOKEN // 16 * 16
    start = from_record(tmp_path / "a", found.kv_tokens - held, 256 - 64, machine())
    result = start.run()
    assert result.source is Source.RECORDED and start.tried == [result.kv_tokens]
    assert 0 <= found.kv_tokens - result.kv_tokens <= 16


def test_a_pod_starts_again_from_its_own_record_before_the_shared_one_arrives(
    tmp_path: Path,
) -> None:
    """As a container that is restarted: its state outlives it, its records have not arrived."""
    shared = tmp_path / "records.json"

    def start(free: int = 256 * MIB, reuse: str | None = None) -> Result:
        if reuse is not None:
            shared.write_text(json.dumps({"version": 1, "reuse": reuse, "records": {}}))
        made = Start(machine(limit=free), tmp_path)
        made.record = shared
        return made.run()

    first = start()
    again = start()
    assert (first.source, again.source) == (Source.MEASURED, Source.RECORDED)
    assert again.kv_tokens == first.kv_tokens
    assert start(reuse="Auto").source is Source.RECORDED
    assert start(reuse="Never").source is Source.MEASURED
    assert start(free=224 * MIB, reuse="Auto").source is Source.MEASURED
    first = start(reuse="Never")
    more = start(free=288 * MIB, reuse="Auto")
    grown = first.kv_tokens + 32 * MIB // BYTES_PER_TOKEN
    assert (more.source, more.kv_tokens) == (Source.RECORDED, grown)
    alone = Start(machine(), tmp_path)  # on a bare machine, without records of others
    assert alone.run().source is Source.MEASURED


def test_a_kill_at_the_final_size_goes_on_from_95_percent_at_the_next_start(tmp_path: Path) -> None:
    """cgroup v2 kills all processes at once: only the file on the emptyDir remains."""
    tried = []
    for _ in range(4):
        start = Start(machine(surprise=100 * MIB, kills=True), tmp_path)
        with pytest.raises(Killed):
            start.run()
        tried.append(start.tried[-1])
    assert tried == sorted(tried, reverse=True) and len(set(tried)) == 4
    with pytest.raises(OutOfMemory, match="no size survived"):
        Start(machine(surprise=100 * MIB, kills=True), tmp_path).run()


def test_a_kill_for_host_memory_says_nothing_about_a_gpu_s_size(tmp_path: Path) -> None:
    """It was tried again with 95 %, then 90 %, of a size that fitted the GPU."""
    tried = []
    for _ in range(3):
        start = Start(machine(surprise=100 * MIB, kills=True, gpu=True), tmp_path)
        with pytest.raises(Killed):
            start.run()
        tried.append(start.tried)
    assert tried[0] == tried[1] == tried[2] and len(tried[0]) == 1


def test_a_kill_while_probing_is_no_reason_to_shrink(tmp_path: Path) -> None:
    """Nor is one such kill an answer: a node that restarts makes it too. Two are."""
    hungry = {"price": 2 * MIB, "kills": True}
    for _ in range(2):
        with pytest.raises(Killed):
            Start(machine(**hungry), tmp_path).run()
    with pytest.raises(OutOfMemory, match="while probing"):
        Start(machine(**hungry), tmp_path).run()
    assert Start(machine(), tmp_path).run().source is Source.MEASURED  # the cause went, all is well


def test_starts_that_ran_out_of_memory_alike_say_the_same(tmp_path: Path) -> None:
    """Every third one named a kill, where nothing was killed."""
    wanted = replace(SETTINGS, max_model_len=512)
    for _ in range(4):
        with pytest.raises(OutOfMemory, match="no size survived the stress; tried the probe alone"):
            Start(machine(price=2 * MIB), tmp_path, wanted).run()


def test_a_start_that_was_killed_once_while_probing_finds_the_same_size(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Start(machine(price=2 * MIB, kills=True), tmp_path).run()
    again = Start(machine(), tmp_path).run()
    assert again.kv_tokens == Start(machine(), tmp_path).run().kv_tokens  # a search from nothing


def test_a_length_that_was_asked_for_is_kept_after_a_kill(tmp_path: Path) -> None:
    fits = Start(machine(), tmp_path).run().kv_tokens
    wanted = replace(SETTINGS, max_model_len=fits - 32, model_max_len=100_000)
    with pytest.raises(Killed):
        Start(machine(surprise=MIB, kills=True), tmp_path, wanted).run()
    with pytest.raises(ContextDoesNotFit):
        Start(machine(kills=True), tmp_path, wanted).run()


def test_weights_that_leave_nothing_say_so(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="no memory is left for the KV cache") as caught:
        Start(machine(weights=239 * MIB), tmp_path).run()
    assert caught.value.termination().binding is Binding.WEIGHTS


def test_a_context_that_does_not_fit_names_the_largest_that_does(tmp_path: Path) -> None:
    fits = Start(machine(), tmp_path).run().kv_tokens
    wanted = replace(SETTINGS, max_model_len=100_000, model_max_len=100_000)
    start = Start(machine(price=1024), tmp_path, wanted)
    with pytest.raises(ContextDoesNotFit) as caught:
        start.run()
    with pytest.raises(ContextDoesNotFit):  # the restarted container says the same
        Start(machine(price=1024), tmp_path, wanted).run()
    largest = caught.value.termination().largest_max_model_len
    assert largest is not None and fits <= largest < 100_000
    served = Start(machine(price=1024), tmp_path, replace(wanted, max_model_len=largest)).run()
    assert served.kv_tokens >= largest


def test_a_model_s_own_length_is_clipped_to_the_budget(tmp_path: Path) -> None:
    start = Start(machine(), tmp_path, replace(SETTINGS, model_max_len=1_000_000))
    result = start.run()
    assert start.notes.lengths == [result.kv_tokens]


@settings(max_examples=60)
@given(
    limit=st.integers(64, 512),
    weights=st.integers(1, 512),
    price=st.integers(0, 1 << 20),
    surprise=st.integers(0, 64),
)
def test_whatever_the_machine_a_published_size_survived_and_left_the_headroom(
    tmp_path: Path, limit: int, weights: int, price: int, surprise: int
) -> None:
    made = machine(limit=limit * MIB, weights=weights * MIB, price=price, surprise=surprise * MIB)
    (tmp_path / "attempts.json").unlink(missing_ok=True)
    try:
        result = Start(made, tmp_path).run()
    except OutOfMemory:
        return
    assert result.kv_tokens % 16 == 0 and result.kv_tokens >= 32
    worst = made.used() + 128 * price + made.surprise + made.working_files() + 8 * MIB
    assert worst <= made.limit or result.kv_tokens < 128  # a small cache never sees a full chunk
