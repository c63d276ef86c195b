"""The one table from an error of a reconcile to the condition that tells of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kvline_operator.answers import Refusal
from kvline_operator.errors import ApiError, Deleting, NameConflict, NewerState, SpecError
from kvline_operator.observe.pods import condition_of
from kvline_operator.report.service_state import Condition

Object = dict[str, Any]
MINUTE = 60.0  # rights, quotas and policies change without an event
SOON = 0.0  # it may pass by itself: with the growing delay of the queue, at most a minute
# Of each reason, the type of its condition, and seconds until the next try.
TABLE = {
    "SpecInvalid": ("Accepted", MINUTE),
    "NameConflict": ("Accepted", MINUTE),
    "NewerState": ("Accepted", MINUTE),
    "Forbidden": ("Accepted", MINUTE),
    "QuotaExceeded": ("Progressing", MINUTE),
    "LimitRangeViolated": ("Progressing", MINUTE),
    "PodSecurityViolated": ("Progressing", MINUTE),
    "AdmissionDenied": ("Progressing", MINUTE),
    "NamespaceTerminating": ("Progressing", MINUTE),
    "WebhookUnavailable": ("Progressing", SOON),
    "ApiUnavailable": ("Progressing", SOON),
    "ChildDeleting": ("Progressing", SOON),
    "InternalError": ("Progressing", SOON),
}
OWN: dict[type[Exception], str] = {
    SpecError: "SpecInvalid",
    NameConflict: "NameConflict",
    NewerState: "NewerState",
    Deleting: "ChildDeleting",
}


def reason(error: Exception) -> str:
    if isinstance(error, ApiError):
        return error.answer.refusal
    return OWN.get(type(error), "InternalError")


def retry_seconds(error: Exception) -> float:
    return TABLE[reason(error)][1]


def refuses(made: Condition, name: str) -> bool:
    """Whether a condition of this table is of this object, and stays until a user or the cluster
    changes something."""
    lasts = TABLE.get(made.reason, ("", SOON)) == (made.type, MINUTE)
    return lasts and made.message.partition(": ")[0].endswith(f" {name}")


def loses_events(error: Exception) -> bool:
    """Whether it keeps an event away only for now."""
    return reason(error) == Refusal.NONE


def is_refusal(error: Exception) -> bool:
    """Whether somebody, or something of the cluster's, has to act."""
    return isinstance(error, ApiError) and reason(error) != Refusal.NONE


def headline(error: Exception) -> str:
    """Without an address, a request's id or a webhook's own words, which may differ from try to
    try."""
    text = str(error).partition(": failed to call webhook")[0]
    return re.sub(r"(denied the request): .*", r"\1", text, flags=re.DOTALL)


def condition(error: Exception, previous: Object, generation: int) -> Condition:
    """`previous` is the status so far, `generation` the service's. What others say may differ from
    try to try, as an address or a request's id in it does: the first message stays. Else each try
    would write the status, and that requeues the service at once."""
    why = reason(error)
    kind, _ = TABLE[why]
    text = str(error)
    if why == "InternalError":
        text = f"{type(error).__name__}: the operator's log has its cause; please report it"
    before = condition_of(previous, kind)
    known = tuple(before.get(key) for key in ("status", "reason", "observedGeneration"))
    if known == ("False", why, generation) and _says_the_same(error, before["message"]):
        text = before["message"]
    return Condition(kind, "False", why, text)


def _says_the_same(error: Exception, before: str) -> bool:
    """Whether this message is of the same cause, for one reason. Of what may pass by itself it is,
    whichever call met it; of a refusal where it refuses the same call: once that is allowed, the
    next one has to be named."""
    if retry_seconds(error) == SOON:
        return True
    return isinstance(error, ApiError) and before.startswith(str(error).partition(": ")[0] + ": ")


def foreign_change(lasting: Iterable[str]) -> Condition | None:
    """Changes by others that came back after each removal."""
    found = list(lasting)
    if not found:
        return None
    text = "; ".join(found) + ": set again after each correction, so it is left for an hour. Stop "
    text += "its manager, and change the InferenceService instead"
    return Condition("UpToDate", "False", "ForeignChange", text)
