"""A start can be watched: in its report and its log. A.3 of issue 33."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from servers import SEARCHED, Server, wait_for
from simulated import Notes
from test_profile import Start, from_record, machine

from kvline_contract.progress import headline
from kvline_contract.report import START_STAGES, Current, State
from kvline_server.errors import OutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.memory.device import MIB
from kvline_server.parent.narrator import SECONDS, Narrator
from kvline_server.parent.report_keeper import ReportKeeper
from kvline_server.sizing.remaining import Remaining


class Watching(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Current] = []

    def __call__(self, progress: Progress) -> None:
        super().__call__(progress)
        if progress.current is not None:
            self.seen.append(progress.current)


def watched(start: Start) -> list[Current]:
    start.notes = made = Watching()
    with suppress(OutOfMemory):
        start.run()
    return made.seen


def stages(seen: list[Current]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((each.stage, each.what) for each in seen))


def test_a_start_reports_each_stage_once_and_its_steps(tmp_path: Path) -> None:
    seen = watched(Start(machine(), tmp_path))
    assert [stage for stage, _ in stages(seen)] == [2, 3, 4]
    assert {each.stages for each in seen} == {START_STAGES}
    # The condition has as many texts: none for each second or step.
    assert len({headline(each) for each in seen}) <= 3
    for stage in (3, 4):
        steps = [each for each in seen if each.stage == stage and each.step]
        assert [each.step for each in steps] == list(range(1, len(steps) + 1))
        assert {each.steps for each in steps} == {len(steps)} and len(steps) > 4
        assert {"decode", "mixed"} <= {each.name for each in steps}
    validates = stages(seen)[-1][1]
    assert validates.startswith("validates ") and validates.endswith("with the largest steps")


def test_a_second_attempt_and_a_failed_start_say_what_they_do(tmp_path: Path) -> None:
    texts = [what for _, what in stages(watched(Start(machine(surprise=10 * MIB), tmp_path)))]
    assert [text.rpartition(", ")[2] for text in texts[-3::2]] == ["attempt 2", "attempt 3"]
    assert texts[-2].startswith("makes the KV cache smaller")
    other = tmp_path / "other"
    other.mkdir()
    failed = stages(watched(Start(machine(weights=60 * MIB, price=2 * MIB), other)))
    assert "measures what smaller settings would leave" in failed[-1][1]


def test_the_rest_is_unknown_until_something_tells(tmp_path: Path) -> None:
    seen = watched(Start(machine(), tmp_path))
    assert seen[0].ready_at is None and next(each for each in seen if each.step).ready_at is None
    start = from_record(tmp_path / "recorded", 20_000, 256, machine())
    record = start.record
    assert record is not None
    record.write_text(record.read_text().replace('"loopMs": 9', f'"loopMs": {10**12}'))
    recorded = watched(start)
    assert [stage for stage, _ in stages(recorded)] == [2, 4]
    assert recorded[0].ready_at is not None


def test_what_is_left_is_by_the_steps_that_were_played() -> None:
    names = ["a", "b", "c", "d"]
    remaining = Remaining()
    assert remaining.rest(names, names, again=True) is None
    remaining.note("a", 2.0)
    assert remaining.rest(names[1:], names, again=True) == 3 * 2.0 + 4 * 2.0
    remaining.note("b", 4.0)
    assert remaining.rest(["c", "d"], names, again=True) == 2 * 3.0 + 2.0 + 4.0 + 2 * 3.0
    assert remaining.rest(["b", "c"], names, again=False) == 4.0 + 3.0


def test_a_log_has_each_stage_at_once_and_its_progress_now_and_then() -> None:
    lines: list[str] = []
    narrator, keeper = Narrator(lines.append), ReportKeeper("uid", "pod", "revision")
    assert keeper.report.current is not None
    began = datetime.fromisoformat(keeper.report.current.since)

    def passes(first: int, last: int) -> None:
        for second in range(first, last):
            for tenth in range(10):
                clock = second + tenth / 10
                narrator.tell(keeper.report, clock, began + timedelta(seconds=clock))

    passes(0, 25)
    assert len(lines) == 3 and all("stage 1 of 4: loads the model" in each for each in lines)
    assert "10 s so far" in lines[1] and "the rest is not known yet" in lines[1]
    keeper.apply(Progress(current=Current(2, 4, "warms up its kernels", keeper.report.updated_at)))
    passes(25, 26)
    assert len(lines) == 4 and "stage 2 of 4" in lines[-1]
    assert SECONDS >= 5
    keeper.restart("killed")
    passes(26, 27)
    assert len(lines) == 5 and "stage 1 of 4" in lines[-1]


def test_a_report_says_what_a_start_does_until_it_ends() -> None:
    keeper = ReportKeeper("uid", "pod", "revision")
    assert keeper.report.current is not None and keeper.report.current.stage == 1
    keeper.apply(Progress(failure=OutOfMemory("none").termination()))
    assert keeper.report.state is State.FAILED and keeper.report.current is None


@pytest.mark.process
def test_the_log_of_a_start_is_never_empty(start: Callable[..., Server]) -> None:
    server = start(**SEARCHED)
    wait_for(lambda: "stage 1 of 4: loads the model" in server.output(), 10)
    server.wait()
    assert server.sizing().get("current") is None
    text = server.output()
    for stage in range(1, START_STAGES + 1):
        assert f"stage {stage} of {START_STAGES}: " in text, text
    assert "Autotuning" not in text
