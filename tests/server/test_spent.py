"""What one stage says of all steps of a stress, and what the parent keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import Machine
from test_profile import Start

from kvline_contract.report import MAX_STAGES, Stage, State
from kvline_server.errors import DeviceOutOfMemory, OutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.memory.device import MIB
from kvline_server.parent import stalls
from kvline_server.parent.report_keeper import ReportKeeper
from kvline_server.sizing.spent import Spent
from kvline_server.worker.step import Step


def spent(ranks: int = 1, routings: tuple[str, ...] = ("",)) -> Spent:
    made = Spent(ranks)
    for name, seconds, nbytes in (("prefill", 0.25, 3), ("decode", 0.5, 9), ("mixed", 0.125, 7)):
        for what in routings:
            made.count_play(what, seconds / 4, seconds / len(routings))
        made.count(name, seconds, nbytes)
    return made


def test_one_stage_has_the_time_of_all_steps_the_most_bytes_and_the_longest_step() -> None:
    detail = "3 steps, the longest decode 500 ms"
    assert spent().stage("stress") == Stage("stress", 875, 9, detail)
    freed = Spent(1)
    freed.count("decode", 0.5, -4)
    assert freed.stage("validate").bytes == -4
    assert freed.slowest_ms == 500


def test_it_tells_the_time_of_each_routing_and_of_each_rank_alone() -> None:
    found = spent(2, ("one", "all")).stage("validate").detail
    assert found == (
        "3 steps, the longest decode 500 ms, one 438 ms, all 438 ms, "
        "each of 2 ranks alone 438 ms, then together"
    )


class Fails(Machine):
    def launch(self, step: Step) -> Machine:
        if len(self.steps) % 4 == 3:
            self.steps.append(step)
            raise DeviceOutOfMemory("simulated")
        return super().launch(step)


def test_of_a_stress_that_fails_the_stage_has_the_steps_that_passed(tmp_path: Path) -> None:
    start = Start(Fails(limit=256 * MIB, weights=100 * MIB, price=64 << 10), tmp_path)
    with pytest.raises(OutOfMemory):
        start.run()
    assert str(start.notes.stages["stress"]).startswith("3 steps, ")


def test_a_validation_s_patience_is_of_the_longest_step_that_any_probe_played() -> None:
    keeper = ReportKeeper("uid", "pod", "revision")
    assert stalls.patience(keeper.probed_ms, 300) == 300
    for probed in (2000, 8000, None, 3000):
        keeper.apply(Progress(probed_ms=probed))
    assert stalls.patience(keeper.probed_ms, 300) == 30 + 5 * 8
    keeper.restart("killed")
    assert stalls.patience(keeper.probed_ms, 300) == 300


def test_stages_over_the_bound_are_summed_up_and_one_that_loads_is_replaced() -> None:
    keeper = ReportKeeper("uid", "pod", "revision")
    keeper.apply(Progress(state=State.LOADING, stage=Stage("load", 1, 5, total_bytes=10)))
    keeper.apply(Progress(stage=Stage("load", 9000, 10)))
    for number in range(50):
        keeper.apply(Progress(stage=Stage(f"s{number}", 100 + number, 1)))
    found = keeper.report.stages
    assert len(found) == MAX_STAGES and found[0] == Stage("load", 9000, 10)
    assert sum(stage.bytes for stage in found) == 60
    assert sum(stage.ms for stage in found) == 9000 + sum(range(100, 150))
