"""How tools read a status: kstatus' rules (Flux, kpt) and Argo CD's script, run as Argo CD runs it,
for every reason of every condition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvline_operator.report.advice import ADVICE
from kvline_operator.report.kstatus import STALLED, abnormal, plain
from kvline_operator.report.service_state import Condition
from kvline_operator.report.status import refused

# The version of Argo CD's interpreter.
lua51 = pytest.importorskip("lupa.lua51", reason="make env: requirements/dev.txt has lupa")
SCRIPT = Path(__file__).parents[2] / "monitoring" / "recipes" / "argocd-health.lua"
GOOD = {
    "Accepted": ("Valid",),
    "ModelAvailable": ("Available", "Random"),
    "CapacityMeasured": ("Validated",),
    "CapacitySufficient": ("Sufficient",),
    "CapacityStable": ("Stable",),
    "Progressing": ("Complete", "RollingOut"),
    "UpToDate": ("UpToDate",),
    "ScalingActive": ("Stable", "Scaling", "AtMaximum"),
    "Ready": ("Serving",),
}
EVERY = [(item.condition, reason) for item in ADVICE for reason in item.reasons]
Object = dict[str, Any]


def service(*made: Condition, generation: int = 2) -> Object:
    conditions = [
        {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message} for c in made
    ]
    status = {"conditions": conditions, "observedGeneration": 2}
    return {"metadata": {"name": "chat", "generation": generation}, "status": status}


def recorded(kind: str, reason: str) -> Object:
    """A service with only this condition; one that is not True makes Ready False."""
    made = {k: Condition(k, "True", r[0], "well") for k, r in GOOD.items()}
    good = reason in GOOD[kind]
    made[kind] = Condition(kind, "True" if good else "False", reason, "why")
    serves = kind in ("CapacityStable", "ScalingActive", "UpToDate")
    if not good and not serves:
        made["Ready"] = Condition("Ready", "False", reason, "why")
        made["UpToDate"] = Condition("UpToDate", "False", "Scaling", "0 of 1")
    if reason == "ScaledToZero":
        made["Ready"] = Condition("Ready", "False", reason, "why")
        made["UpToDate"] = Condition("UpToDate", "True", reason if kind == "UpToDate" else kind)
    conditions = list(made.values())
    return service(*conditions, *abnormal(conditions))


def kstatus(body: Object) -> str:
    """kstatus' generic rules, in its order."""
    status, meta = body.get("status") or {}, body["metadata"]
    if status.get("observedGeneration", meta["generation"]) != meta["generation"]:
        return "InProgress"
    conditions = status.get("conditions") or []
    for item in conditions:
        if item["type"] == "Reconciling" and item["status"] == "True":
            return "InProgress"
        if item["type"] == "Stalled" and item["status"] == "True":
            return "Failed"
    ready = next((c["status"] for c in conditions if c["type"] == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


def argo(body: Object) -> str:
    made = lua51.LuaRuntime(register_eval=False, unpack_returned_tuples=True)
    made.globals()["obj"] = made.table_from(copy.deepcopy(body), recursive=True)
    answer = made.execute(SCRIPT.read_text())
    assert answer["message"]
    return str(answer["status"])


@pytest.mark.parametrize(("kind", "reason"), EVERY)
def test_the_two_agree_on_every_reason(kind: str, reason: str) -> None:
    body = recorded(kind, reason)
    seen = (kstatus(body), argo(body))
    if reason == "ScaledToZero":
        assert seen == ("InProgress", "Healthy")  # kstatus reads only Ready
    elif reason == "Paused":
        assert seen == ("InProgress", "Suspended")
    elif reason in STALLED.get(kind, ()):
        assert seen == ("Failed", "Degraded")
    elif reason in GOOD[kind] or kind in ("CapacityStable", "ScalingActive"):
        assert seen == ("Current", "Healthy")
    else:
        assert seen == ("InProgress", "Progressing")


def test_a_refused_spec_is_not_current_though_the_one_before_serves() -> None:
    wrong = Condition("Accepted", "False", "SpecInvalid", "spec.image is missing")
    status, _ = refused(wrong, {**recorded("Ready", "Serving")}, "now")
    kinds = {c["type"]: c["status"] for c in status["conditions"]}
    body = {"metadata": {"name": "chat", "generation": 2}, "status": status}
    assert kinds["Ready"] == "True" and "Reconciling" not in kinds
    assert (kstatus(body), argo(body)) == ("Failed", "Degraded")
    assert "Stalled" not in [c["type"] for c in plain(status)]


def test_a_spec_that_was_not_read_yet_is_on_its_way() -> None:
    late = service(Condition("Ready", "True", "Serving"), generation=3)
    for body in (late, {"metadata": {"name": "chat", "generation": 1}}):
        assert argo(body) == "Progressing"
    assert kstatus(late) == "InProgress"


def test_both_are_there_only_while_they_are_true() -> None:
    good = [Condition(kind, "True", reasons[0]) for kind, reasons in GOOD.items()]
    assert abnormal(good) == []
    for kind, reason in EVERY:
        made = recorded(kind, reason)["status"]["conditions"]
        found = [c["type"] for c in made if c["type"] in ("Reconciling", "Stalled")]
        assert len(found) <= 1
