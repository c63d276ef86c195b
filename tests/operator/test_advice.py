"""Every reason that a condition can have is explained, and nothing else is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from kvline_contract.exits import ExitCode
from kvline_contract.report import State
from kvline_operator.answers import of_message
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


CRD = Path(__file__).parents[2] / "manifests" / "crd.yaml"


def test_every_field_that_advice_names_is_one() -> None:
    version = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]
    for item in ADVICE:
        for path in re.findall(r"spec\.[A-Za-z.]*[A-Za-z]", f"{item.happened} {item.do}"):
            field = version["schema"]["openAPIV3Schema"]
            for name in path.split("."):
                assert name in field.get("properties", {}), f"{item.reasons}: {path}"
                field = field["properties"][name]


@pytest.mark.parametrize(
    ("condition", "reason", "names"),
    [
        ("Progressing", "QuotaExceeded", "spec.resources.cpuLimit"),
        ("Progressing", "LimitRangeViolated", "request what it allows spec.resources.cpuLimit"),
        ("Progressing", "PodSecurityViolated", "sidecar serverPods.platformUser label"),
        ("Progressing", "ImagePullFailed", "spec.imagePullSecrets"),
        ("ModelAvailable", "DownloadFailed", "hubEndpoint hubProxy hubCA"),
        ("CapacitySufficient", "BelowMinimum", "without a GPU raise spec.resources.memory"),
        ("CapacityMeasured", "OutOfMemory", "without a GPU raise spec.resources.memory"),
    ],
)
def test_advice_names_what_helps(condition: str, reason: str, names: str) -> None:
    found = advise(condition, reason)
    assert found is not None
    assert set(names.split()) <= set(re.split(r"[^\w.]+", found.do))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("no PriorityClass with name high was found", "spec.scheduling.priorityClassName"),
        ('pod rejected: RuntimeClass "nvidia" not found', "spec.scheduling.runtimeClassName"),
        (
            'error looking up service account ns/chat: serviceaccount "chat" not found',
            "spec.serviceAccountName",
        ),
    ],
)
def test_what_a_pod_names_and_the_cluster_lacks_has_its_field(message: str, field: str) -> None:
    """The API server refuses it by an admission plug-in, in these words."""
    reason = of_message(f'pods "chat-1" is forbidden: {message}')
    assert reason is not None
    found = advise("Progressing", str(reason))
    assert found is not None and field in found.do
