"""Every reason that a condition can have is explained, and nothing else is."""

from __future__ import annotations

import inspect
import re

from kvline_contract.exits import ExitCode
from kvline_contract.report import State
from kvline_operator.observe import trouble
from kvline_operator.plan import autoscale, prepare
from kvline_operator.report import capacity, conditions, failures
from kvline_operator.report.advice import ADVICE, advise

WRITTEN = re.compile(r'Condition\(\s*(kind|"\w+"), "\w+", "(\w+)"')
PAIR = re.compile(r'"(ModelAvailable|Progressing|CapacityMeasured)", "(\w+)"')
KIND = re.compile(r'kind = "(\w+)"')


def created() -> set[tuple[str, str]]:
    """Condition and reason of every condition that the code creates."""
    found = {(m.condition, m.reason) for m in ExitCode if m.condition and m.reason}
    sizing = set(State) - {State.FAILED}
    found |= {("CapacityMeasured", str(state)) for state in sizing}
    found |= {("ScalingActive", str(activity)) for activity in autoscale.Activity}
    for module in (prepare, trouble):
        found |= set(PAIR.findall(inspect.getsource(module)))
    found |= {(row[0], reason) for reason, row in failures.TABLE.items()}
    for module in (conditions, capacity, failures):
        kind = ""
        for part in re.split(r"\ndef ", inspect.getsource(module)):
            named = KIND.search(part)
            # A helper function follows the one that passes it the condition's type.
            kind = named[1] if named else kind
            for literal, reason in WRITTEN.findall(part):
                found.add((kind if literal == "kind" else literal.strip('"'), reason))
    return found


def test_every_reason_has_advice_and_every_advice_a_reason() -> None:
    explained = {(item.condition, reason) for item in ADVICE for reason in item.reasons}
    own = {(c, r) for c, r in created() if c != "Ready"}
    assert own - explained == set()
    assert {(c, r) for c, r in explained if c != "Ready"} - own == set()


def test_ready_has_the_advice_of_what_stands_in_its_way() -> None:
    for condition, reason in created():
        if condition != "Ready":
            assert advise("Ready", reason) is not None
    assert advise("Ready", "BelowMinimum") == advise("CapacitySufficient", "BelowMinimum")
    assert advise("Ready", "SomethingElse") is None
