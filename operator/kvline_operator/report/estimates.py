"""What a change of one field would give, before anybody asks: in status.capacity, and as lines of
`kubectl kvline` and of the page. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_operator.plan.forecast import Estimate, estimates, tokens_per_gib
from kvline_operator.report.service_state import ServiceState
from kvline_operator.store.capacity_status import CapacityStatus

Object = dict[str, Any]
BOUNDS = {"AtLeast": "at least", "AtMost": "at most", "": "about"}
ARITHMETIC = "arithmetic from the measured parts, not measured"


def what_if(measured: CapacityStatus | None, state: ServiceState) -> Object:
    """The fields of status.capacity; none before a replica has served."""
    if measured is None:
        return {}
    out: Object = {"tokensPerGiB": tokens_per_gib(measured)}
    inputs = state.stable_data.get("inputs") or state.inputs
    rows = estimates(measured, inputs, _running(state, inputs))
    return out | ({"estimates": [_row(each) for each in rows]} if rows else {})


def _running(state: ServiceState, inputs: Object) -> int | None:
    """Requests that a replica runs at once: as one reports it, else as the spec has it."""
    reports = [p.report for p in state.described if p.report is not None]
    effective = next((r.effective for r in reports if r.effective is not None), None)
    if effective is not None:
        return effective.max_running_requests
    found = (inputs.get("engine") or {}).get("maxRunningRequests")
    return found if isinstance(found, int) else None


def _row(estimate: Estimate) -> Object:
    out: Object = {
        "field": estimate.field,
        "value": estimate.value,
        "kvTokens": estimate.kv_tokens,
    }
    return out | ({"bound": estimate.bound} if estimate.bound else {})


@dataclass(frozen=True, slots=True)
class Shown:
    """A row for people."""

    change: str  # without «spec.», as `resources.memory 3072Mi`
    tokens: str  # «at least 39,700»
    ratio: str  # of the tokens now


def rows(status: Object) -> tuple[Shown, ...]:
    """Of a status; an operator of an earlier version has written none."""
    capacity = status.get("capacity") or {}
    now = capacity.get("kvTokens") or 1
    return tuple(
        Shown(
            f"{row['field'].removeprefix('spec.')} {row['value']}",
            f"{BOUNDS.get(row.get('bound', ''), '')} {row['kvTokens']:,}",
            f"{row['kvTokens'] / now:.2f}x",
        )
        for row in capacity.get("estimates") or ()
    )


def per_gib(status: Object) -> str:
    """Empty where a status of an earlier operator has no figure."""
    tokens = (status.get("capacity") or {}).get("tokensPerGiB")
    each = " on each rank" if (status.get("capacity") or {}).get("ranks") else ""
    return f"{tokens:,} KV tokens in a GiB of KV cache{each}" if tokens else ""
