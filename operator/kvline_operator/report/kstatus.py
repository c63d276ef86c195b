"""Reconciling and Stalled, the conditions of the kstatus convention (Flux, kpt). Pure.

Abnormal-true, unlike all others: each is present only while True, and never both. Stalled means
that a user has to change something.
"""

from __future__ import annotations

from typing import Any

from kvline_operator.report.service_state import Condition

TYPES = ("Reconciling", "Stalled")
STALLED = {
    "Accepted": ("SpecInvalid", "NameConflict", "NewerState", "Forbidden"),
    "ModelAvailable": ("NotFound", "Invalid", "Unsupported", "ClaimMissing"),
    "CapacityMeasured": ("OutOfMemory", "ContextDoesNotFit", "StepTooLong"),
    "CapacitySufficient": ("BelowMinimum", "NotComparable"),
    "Progressing": (
        "DeadlineExceeded",
        "LimitRangeViolated",
        "PodSecurityViolated",
        "AdmissionDenied",
        "NamespaceTerminating",
    ),
    "UpToDate": ("RevisionRejected", "PromotionRefused", "ForeignChange"),
}


def abnormal(made: list[Condition]) -> list[Condition]:
    """Reconciling or Stalled, to be added to the other conditions; empty where neither applies."""
    for condition in made:
        stalls = condition.reason in STALLED.get(condition.type, ())
        if condition.status == "False" and stalls:
            return [Condition("Stalled", "True", condition.reason, condition.message)]
    for name in ("UpToDate", "Ready", "Progressing"):
        for condition in made:
            moves = condition.status != "True" and condition.reason != "ScaledToZero"
            if condition.type == name and moves:
                return [Condition("Reconciling", "True", condition.reason, condition.message)]
    return []


def plain(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The conditions of a status without these two, which repeat another condition."""
    return [c for c in status.get("conditions") or [] if c.get("type") not in TYPES]
