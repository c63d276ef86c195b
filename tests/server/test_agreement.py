"""The profile loop over several simulated ranks: whichever fails at whatever stage, all end at one
size or with one diagnosis, which names the rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import STRESS
from simulated import (
    BYTES_PER_TOKEN,
    NO_FAULT,
    SETTINGS,
    Apart,
    Fault,
    Gpu,
    Machine,
    Notes,
    Together,
)

from kvline_contract.memory import (
    ACTIVATIONS,
    COLLECTIVES,
    GRAPHS,
    HEADROOM,
    KV_CACHE,
    OTHERS,
    PROCESSES,
)
from kvline_contract.report import Binding, Outcome, Result, SizingReport, State
from kvline_server.command.size import summary, waterfalls
from kvline_server.errors import (
    ContextDoesNotFit,
    DeviceOutOfMemory,
    OutOfMemory,
    SizingError,
)
from kvline_server.kernels.attention import SHORT_CHUNKS
from kvline_server.memory.device import MIB
from kvline_server.parallel.executor import Executor
from kvline_server.sizing.diagnosis import BEFORE, Diagnosis
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.profile import ProfileLoop, shrink
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.session import MAX_TRIES
from kvline_server.sizing.settings import EngineSettings

FINGERPRINT = "f" * 32
IDENTITY = FINGERPRINT, "bfloat16"  # of what is loaded
SMALL = replace(SETTINGS, model_max_len=64, max_prefill_tokens=32, max_running_requests=2)
PLAYED = STRESS + len(SHORT_CHUNKS)  # steps of the stress set, on a GPU
EACH = [(ranks, rank) for ranks in (2, 3, 4) for rank in range(ranks)]
BEFORE_SIZING = ["tune", "first pages", "warm-up", "capture"]
AT_THE_FINAL_SIZE = ["map", "hold", "validate alone"]


def gpu(**changed: Any) -> Gpu:
    return Gpu(**({"limit": 256 * MIB, "weights": 100 * MIB, "price": 64 << 10} | changed))


def cpu(**changed: Any) -> Machine:
    return Machine(**({"limit": 256 * MIB, "weights": 100 * MIB, "price": 64 << 10} | changed))


class Start:
    """One start of a server with several ranks, in a folder that outlives it."""

    def __init__(
        self,
        machines: Sequence[Machine],
        folder: Path,
        fault: Fault = NO_FAULT,
        wanted: EngineSettings = SMALL,
    ) -> None:
        self.machines, self.folder, self.wanted = machines, folder, wanted
        self.executor = Together(machines, fault)
        self.notes = Notes()
        self.pause: Callable[[float], None] = lambda _: None

    def run(self) -> Result:
        first = self.machines[0]
        executor: Executor = self.executor if len(self.machines) > 1 else first
        free = tuple(m.limit - getattr(m, "neighbour", 0) for m in self.machines)
        try:
            return ProfileLoop(
                device=first,
                settings=self.wanted,
                loaded=Loaded(
                    executor, 1000, first.owned, first.groups, first.stress, FINGERPRINT, "bfloat16"
                ),
                send=self.notes,
                store=AttemptStore(self.folder / "attempts.json"),
                record_file=None,
                wait_for_neighbours=lambda: None,
                free_before_weights=free,
                pause=self.pause,
            ).run(0.0)
        finally:
            assert not any(m.taken for m in self.machines), "the canary is held"
            assert len({m.pages for m in self.machines}) == 1

    def fails(self) -> SizingError:
        with pytest.raises(SizingError) as caught:
            self.run()
        return caught.value

    @property
    def tried(self) -> list[int]:
        return [a.target_tokens for n, a in sorted(self.notes.attempts.items()) if n]

    @property
    def kept(self) -> list[tuple[int, str]]:
        """Attempts in the file that outlives the start."""
        file = self.folder / "attempts.json"
        written = json.loads(file.read_text())["attempts"] if file.exists() else []
        return [(attempt["number"], attempt["outcome"]) for attempt in written]


@pytest.mark.parametrize(("ranks", "rank"), EACH)
@pytest.mark.parametrize("stage", BEFORE_SIZING)
def test_a_rank_that_fails_before_sizing_ends_all_with_one_diagnosis(
    tmp_path: Path, stage: str, ranks: int, rank: int
) -> None:
    machines = [gpu(trial=MIB, graphs=MIB) for _ in range(ranks)]
    error = Start(machines, tmp_path, Fault(stage, rank, 1)).fails()
    assert f"on GPU {rank} (rank {rank} of {ranks})" in str(error)
    assert error.memory is not None and len(str(error)) < 1024


@pytest.mark.parametrize(("ranks", "rank"), EACH)
def test_a_rank_that_fails_while_probing_is_tried_again_on_gpus_and_then_named(
    tmp_path: Path, ranks: int, rank: int
) -> None:
    stage, machines = "probe alone", [gpu() for _ in range(ranks)]
    assert Start(machines, tmp_path, Fault(stage, rank, 1)).run().kv_tokens > 30_000
    start = Start([gpu() for _ in range(ranks)], tmp_path, Fault(stage, rank, 9))
    assert f"on GPU {rank} (rank {rank} of {ranks})" in str(start.fails())
    assert start.notes.attempts[0].outcome is Outcome.OUT_OF_MEMORY
    assert not start.kept, "the next start probes again, and says the same"
    start.folder.joinpath("attempts.json").unlink()
    error = Start([cpu() for _ in range(ranks)], tmp_path, Fault(stage, rank, 1)).fails()
    assert f"on rank {rank} of {ranks}" in str(error) and "GPU" not in str(error)


@pytest.mark.parametrize(("ranks", "rank"), EACH)
@pytest.mark.parametrize("stage", AT_THE_FINAL_SIZE)
def test_a_rank_that_fails_at_the_final_size_shrinks_all_and_is_named_after_four(
    tmp_path: Path, stage: str, ranks: int, rank: int
) -> None:
    start = Start([gpu() for _ in range(ranks)], tmp_path, Fault(stage, rank, 1))
    result = start.run()
    first, second = start.tried
    assert second == shrink(first) == result.kv_tokens
    assert {m.pages for m in start.machines} == {(second // 16 + 1,)}
    assert not start.kept
    start = Start([gpu() for _ in range(ranks)], tmp_path, Fault(stage, rank, 9))
    error = start.fails()
    assert f"on GPU {rank} (rank {rank} of {ranks})" in str(error)
    assert [n for n, _ in start.kept] == [0, 1, 2, 3, 4]
    assert [a.number for a in error.attempts] == [0, 1, 2, 3, 4]


def test_every_step_reports_that_each_rank_ran_it_alone_and_then_together(tmp_path: Path) -> None:
    start = Start([gpu(), gpu()], tmp_path)
    start.run()
    for name in ("stress", "validate"):
        detail = str(start.notes.stages[name])
        assert detail.startswith("7 steps, ") and "each of 2 ranks alone" in detail
        assert "then together" in detail
    assert len(start.machines[1].steps) == 4 * PLAYED
    alone = Start([gpu()], tmp_path)
    alone.run()
    assert len(alone.machines[0].steps) == 2 * PLAYED
    assert "alone" not in str(alone.notes.stages["stress"])


@pytest.mark.parametrize("stage", ["probe together", "validate together"])
@pytest.mark.parametrize(("ranks", "rank"), EACH)
def test_ranks_that_wait_for_one_that_failed_end_and_the_next_start_goes_on(
    tmp_path: Path, stage: str, ranks: int, rank: int
) -> None:
    """A launch together that fails asks nothing of the ranks any more, and leaves its attempt."""

    def start(times: int = 1) -> Start:
        return Start([gpu() for _ in range(ranks)], tmp_path, Fault(stage, rank, times))

    first = start()
    ends(first)
    number = 0 if stage.startswith("probe") else 1
    assert first.kept[-1] == (number, "OutOfMemory")
    second = start(times=0)
    kv_tokens = second.run().kv_tokens
    assert kv_tokens == (shrink(first.tried[0]) if number else second.tried[0])
    for _ in range(MAX_TRIES if number else 2):
        ends(start())
    error = start(times=0).fails()
    assert isinstance(error, OutOfMemory) and f"of {ranks})" in str(error)


def ends(start: Start) -> None:
    """As its parent sees it, which then says that the attempt ran out of memory."""
    with pytest.raises(Apart):
        start.run()
    store = AttemptStore(start.folder / "attempts.json")
    assert start.kept[-1][1] == "Running"
    store.open(FINGERPRINT, gpu=False)
    store.end(Outcome.OUT_OF_MEMORY, None)


def test_a_neighbour_on_one_gpu_lowers_the_size_of_all_and_is_named(tmp_path: Path) -> None:
    """And wherever it is found: in a report of success, and in each error."""
    free = Start([gpu(), gpu()], tmp_path).run().kv_tokens
    start = Start([gpu(), gpu(neighbour=20 * MIB)], tmp_path)
    result = start.run()
    assert free - result.kv_tokens == 20 * MIB // BYTES_PER_TOKEN
    assert result.memory is result.ranks[1] and result.free_mib == 236
    details = [p.detail for memory in result.ranks for p in memory.parts if p.name == PROCESSES]
    assert details == [BEFORE, "20 MiB of other processes on GPU 1 (rank 1 of 2)"]
    assert [memory.mib(HEADROOM) for memory in result.ranks] == [28, 8]
    assert start.notes.attempts[1].lowest_free_mib == 8
    (warning,) = start.notes.warnings
    assert "GPU 1 (rank 1 of 2) limits every rank" in warning and "up to 20 MiB" in warning
    wanted = replace(SMALL, max_model_len=free, model_max_len=free)
    error = Start([gpu(), gpu(neighbour=20 * MIB)], tmp_path, wanted=wanted).fails()
    assert isinstance(error, ContextDoesNotFit) and error.binding is Binding.NEIGHBOURS
    assert "other processes hold 20 MiB of GPU 1 (rank 1 of 2); " in str(error)
    assert error.memory is not None and error.memory.total_mib == 256
    error = Start([gpu(), gpu(neighbour=150 * MIB)], tmp_path).fails()
    assert "other processes hold 150 MiB of GPU 1 (rank 1 of 2)" in str(error)


def test_a_neighbour_that_comes_to_one_gpu_at_the_final_size_is_counted(tmp_path: Path) -> None:
    class Visited(Gpu):
        def resize(self, pages: tuple[int, ...]) -> None:
            self.neighbour = 40 * MIB if pages > (1000,) else self.neighbour
            super().resize(pages)

    visited = Visited(limit=256 * MIB, weights=100 * MIB, price=64 << 10)
    start = Start([gpu(), visited], tmp_path)
    result = start.run()
    first, second = start.tried
    assert second == result.kv_tokens and first - second >= 40 * MIB // BYTES_PER_TOKEN
    assert result.memory is result.ranks[1]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_neighbour_that_comes_to_one_gpu_while_probing_is_waited_for(
    tmp_path: Path, leaves: bool
) -> None:
    class Visited(Gpu):
        def reset_peak(self) -> None:
            super().reset_peak()
            self.neighbour = 40 * MIB if not waits else self.neighbour

    waits: list[float] = []
    visited = Visited(limit=256 * MIB, weights=100 * MIB, price=64 << 10)
    wanted = replace(SMALL, max_model_len=30_000, model_max_len=30_000)
    start = Start([gpu(), visited], tmp_path, wanted=wanted)

    def pause(seconds: float) -> None:
        waits.append(seconds)
        visited.neighbour = 0 if leaves else visited.neighbour

    start.pause = pause
    if leaves:
        assert start.run().kv_tokens > 30_000 and len(waits) == 1
    else:
        error = start.fails()
        assert "40 MiB of GPU 1 (rank 1 of 2), 40 MiB of it taken since this" in str(error)
        assert len(waits) == 4


def test_a_rank_that_needed_part_of_the_headroom_is_named(tmp_path: Path) -> None:
    """On a CPU no allocation fails for it."""

    class Overdrawn(Machine):
        def used(self) -> int:
            return super().used() + (20 * MIB if self.taken else 0)

        def _take(self, nbytes: int) -> None:
            self.highest = max(self.highest, super().used() + nbytes)

    overdrawn = Overdrawn(limit=256 * MIB, weights=100 * MIB, price=64 << 10)
    wanted = replace(SMALL, pinned_kv_tokens=34_000)
    error = Start([cpu(), overdrawn], tmp_path, wanted=wanted).fails()
    assert "on rank 1 of 2" in str(error) and isinstance(error.__cause__, DeviceOutOfMemory)
    assert error.__cause__.rank == 1


def test_each_rank_has_a_memory_of_its_own_whose_parts_add_up(tmp_path: Path) -> None:
    machines = [
        gpu(graphs=4 * MIB, collectives=6 * MIB),
        gpu(graphs=9 * MIB, collectives=6 * MIB, price=256 << 10),
    ]
    start = Start(machines, tmp_path)
    result = start.run()
    assert [memory.mib(GRAPHS) for memory in result.ranks] == [4, 9]
    assert [memory.mib(COLLECTIVES) for memory in result.ranks] == [6, 6]
    assert [memory.mib(ACTIVATIONS) for memory in result.ranks] == [2, 8]
    assert len({memory.mib(KV_CACHE) for memory in result.ranks}) == 1
    assert result.memory is result.ranks[1] and not start.notes.warnings
    for memory in result.ranks:
        assert abs(memory.mib(OTHERS)) <= 3  # of rounding


def test_what_collectives_take_is_no_neighbour_that_arrived(tmp_path: Path) -> None:
    start = Start([gpu(collectives=60 * MIB, neighbour=1) for _ in range(2)], tmp_path)
    result = start.run()
    assert result.kv_tokens > 10_000 and not start.notes.warnings
    details = {p.detail for memory in result.ranks for p in memory.parts}
    assert not any("of other processes" in (detail or "") for detail in details)


def test_a_person_sees_each_rank_s_waterfall_and_which_one_binds(tmp_path: Path) -> None:
    result = Start([gpu(), gpu(neighbour=20 * MIB)], tmp_path).run()
    titles = [table.title for table in waterfalls(result, gpu=True)]
    assert titles == ["GPU 0 (rank 0 of 2)", "GPU 1 (rank 1 of 2): the least memory left"]
    assert next(table.title for table in waterfalls(result, gpu=False)) == "rank 0 of 2"
    report = SizingReport("", "", "", 1, State.VALIDATED, "", "", result=result)
    assert "(4096 bytes each on every one of 2 ranks)" in summary(report, result)
    one = replace(result, ranks=result.ranks[:1])
    assert [table.title for table in waterfalls(one, gpu=True)] == [None]
    assert "(4096 bytes each), " in summary(report, one)


def test_weights_that_do_not_fit_name_the_rank() -> None:
    made = gpu(weights=300 * MIB)
    error = Diagnosis(made, SMALL, made.owned, rank=1, ranks=2).weights_do_not_fit(256 * MIB)
    assert "256 MiB of 256 MiB are free on GPU 1 (rank 1 of 2)" in str(error)
    error = Diagnosis(made, SMALL, made.owned).weights_do_not_fit(256 * MIB)
    assert "256 MiB of 256 MiB are free; " in str(error)


def worst(machine: Gpu, wanted: EngineSettings) -> int:
    """Bytes of the largest step beside what is reserved."""
    step = wanted.max_prefill_tokens * machine.price + machine.surprise
    return machine.used() + step + (wanted.headroom_mib << 20)


machines = st.builds(
    gpu,
    limit=st.integers(96, 512).map(lambda mib: mib * MIB),
    weights=st.just(64 * MIB),
    price=st.integers(0, 1 << 20),
    neighbour=st.integers(0, 128).map(lambda mib: mib * MIB),
    surprise=st.sampled_from([0, 0, 0, 5 * MIB, 20 * MIB]),
    graphs=st.integers(0, 8).map(lambda mib: mib * MIB),
)


@settings(max_examples=60)
@given(st.lists(machines, min_size=2, max_size=4))
def test_whatever_the_ranks_one_size_fits_all_and_is_the_smallest(
    tmp_path: Path, together: list[Gpu]
) -> None:
    def run(found: Sequence[Gpu]) -> Result | None:
        (tmp_path / "attempts.json").unlink(missing_ok=True)
        try:
            return Start(found, tmp_path).run()
        except SizingError:
            return None

    alone = [run([replace(machine, steps=[])]) for machine in together]
    result = run(together)
    if result is None:
        assert None in alone or any(machine.surprise for machine in together)
        return
    assert len(result.ranks) == len(together)
    for machine, memory in zip(together, result.ranks, strict=True):
        assert machine.pages == (result.kv_tokens // 16 + 1,)
        assert worst(machine, SMALL) <= machine.limit or result.kv_tokens < 32
        assert sum(part.mib for part in memory.parts) == memory.total_mib == machine.limit // MIB
    if not any(machine.surprise for machine in together):
        sizes = [one.kv_tokens for one in alone if one is not None]
        assert len(sizes) == len(alone) and result.kv_tokens == min(sizes)
        binding = result.ranks.index(result.memory)
        # In MiB two ranks may have equally little left.
        assert sizes[binding] - min(sizes) <= MIB // BYTES_PER_TOKEN + 32
