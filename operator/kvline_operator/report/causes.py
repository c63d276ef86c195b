"""Which of a service's conditions are causes, and which only wait for another one. Pure; for
`kubectl kvline explain`."""

from __future__ import annotations

from typing import Any

from kvline_contract.report import State

# In the order of cause and consequence.
ORDER = (
    "Accepted",
    "Progressing",
    "ModelAvailable",
    "CapacityMeasured",
    "CapacitySufficient",
    "UpToDate",
    "CapacityStable",
    "ScalingActive",
)
BEFORE_SIZING = ORDER[:3]
# A condition that is False for one of these reasons waits for another one.
CONSEQUENCES = {
    ("Progressing", "DeadlineExceeded"),
    ("CapacityMeasured", "Pending"),
    *(("CapacityMeasured", str(state)) for state in State),
    ("UpToDate", "RollingOut"),
    ("UpToDate", "Scaling"),
    ("UpToDate", "GateHeld"),
    ("ScalingActive", "DemandUnknown"),
}
# A condition that is met, with a reason that asks for something nevertheless.
MET = {("ScalingActive", "AtMaximum"), ("ScalingActive", "ForeignChange")}
HARMLESS = ("NoRecord", "ScaledToZero")


def causes(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a status' conditions those that have a cause of their own, the gravest first; else the
    first one that is not met. After them what is met and asks for something."""
    unmet = [c for c in conditions if c["type"] in ORDER and c["status"] != "True"]
    unmet = [c for c in unmet if c["reason"] not in HARMLESS]
    unmet.sort(key=lambda c: ORDER.index(c["type"]))
    own = [c for c in unmet if (c["type"], c["reason"]) not in CONSEQUENCES]
    # Of a start its stage says the most, and that replicas are missing the least.
    unmet.sort(key=lambda c: c["status"] == "Unknown")
    unmet.sort(key=lambda c: c["type"] == "ModelAvailable" or c["reason"] == "Scaling")
    met = [c for c in conditions if c["status"] == "True" and (c["type"], c["reason"]) in MET]
    return ([c for c in own if c["status"] == "False"] or unmet[:1]) + met
