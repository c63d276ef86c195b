"""The condition of a service through whole starts, from what their servers reported."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from services import PLAIN, by_type, service_state
from test_profile import Start, machine

from kvline_server.memory.device import MIB
from kvline_server.parent.report_keeper import ReportKeeper

LOADS = ("Loading", "stage 1 of 4: loads the model")
MEASURES = ("Stressing", "stage 3 of 4: measures the largest steps beside a small KV cache")

VALIDATES = ("Validating", "stage 4 of 4: validates N tokens with the largest steps")
SHRINKS = ("ShrunkRetry", "stage 4 of 4: makes the KV cache smaller, as N tokens did not fit")


class Service(ReportKeeper):
    """Its condition after each change of a server's report."""

    def __init__(self) -> None:
        super().__init__("u1", "chat-aaaaa-1", "aaaaa")
        self.seen: list[tuple[str, str]] = []
        self.reconcile()

    def _change(self, **values: object) -> None:
        super()._change(**values)
        self.reconcile()

    def reconcile(self) -> None:
        """As it would be written were the report read now."""
        pod = replace(PLAIN, running=True, report=self.report)
        found = by_type(service_state(pod))["CapacityMeasured"]
        text = found.message.partition(", since")[0]
        now = (found.reason, re.sub(r"\d+ tokens", "N tokens", text))
        if self.seen[-1:] != [now]:
            self.seen.append(now)


def conditions(folder: Path, **made: int) -> list[tuple[str, str]]:
    start, service = Start(machine(**made), folder), Service()
    start.notes = service.apply  # type: ignore[assignment]
    start.run()
    return service.seen


@pytest.mark.parametrize(("made", "tries"), [({}, False), ({"trial": MIB}, True)])
def test_a_start_writes_its_condition_once_a_stage(
    tmp_path: Path, made: dict[str, int], tries: bool
) -> None:
    """With a reason that says what the message says."""
    second = ("Autotuning" if tries else "Probing", "stage 2 of 4: warms up its kernels")
    assert conditions(tmp_path, **made) == [LOADS, second, MEASURES, VALIDATES]


def test_a_size_that_does_not_fit_is_a_reason_of_its_own(tmp_path: Path) -> None:
    stages = conditions(tmp_path, surprise=10 * MIB)
    again = [(VALIDATES[0], f"{VALIDATES[1]}, attempt {number}") for number in (2, 3)]
    assert stages[3:] == [VALIDATES, SHRINKS, again[0], SHRINKS, again[1]]


def test_a_start_after_a_kill_says_that_it_loads_again() -> None:
    service = Service()
    service.restart("killed")
    assert service.seen[-1] == (
        "ShrunkRetry",
        "stage 1 of 4: loads the model again, for a smaller KV cache",
    )
