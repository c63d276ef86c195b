"""The annotations in which operators before the document kept a revision's state. Pure.

They are read until the document takes their place. One that is unreadable counts as absent.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from kvline_contract.codec import MAX_INTEGER, MAX_KEY, ContractError, encode
from kvline_contract.report import Termination
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.container_ends import MAX_ENDS, MAX_PODS
from kvline_operator.store.verdict import MAX_MESSAGE

PREFIX = "kvline.dev/"
RESULTS = {"Passed": "Passed", "Failed": "Rejected", "Promoted": "Passed"}
Object = dict[str, Any]


def document(annotations: dict[str, str]) -> Object:
    """Version 1 of the document."""
    kept = _Kept(annotations)
    out: Object = {
        "version": 1,
        "accepted": kept.number("accepted"),
        "bytesPerToken": kept.number("bytes-per-token"),
        "baseline": _baseline(kept.json("baseline")),
        "missingSince": kept.text("missing-since", 32),
        "ends": _ends(kept.json("ends")),
    }
    result = RESULTS.get(kept.text("verdict"))
    if result is not None:
        out["verdict"] = {
            "result": result,
            "promoted": kept.text("verdict") == "Promoted",
            "against": kept.number("against"),
            "measured": kept.number("measured"),
            "required": kept.number("required"),
            "baseline": kept.number("compared"),
            "message": kept.text("message", MAX_MESSAGE),
            "diagnosis": _diagnosis(kept.text("diagnosis")),
        }
    if against := kept.number("expired"):
        out["expiry"] = {
            "against": against,
            "message": kept.text("expired-message", MAX_MESSAGE),
            "policy": kept.text("expired-policy", 64),
        }
    capacity = CapacityStatus.parse(kept.text("capacity"))
    return out | ({"capacity": encode(capacity)} if capacity is not None else {})


class _Kept:
    """Annotations by name, in the form that is asked for."""

    def __init__(self, annotations: dict[str, str]) -> None:
        self._annotations = annotations

    def text(self, name: str, limit: int | None = None) -> str:
        return self._annotations.get(PREFIX + name, "")[:limit]

    def number(self, name: str) -> int:
        text = self.text(name)
        found = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
        return found if found <= MAX_INTEGER else 0

    def json(self, name: str) -> Object:
        with suppress(ValueError, RecursionError):
            found = json.loads(self.text(name))
            return found if isinstance(found, dict) else {}
        return {}


def _diagnosis(text: str) -> Object | None:
    try:
        return dict(encode(Termination.parse(text)))
    except ContractError:
        return None


def _baseline(found: Object) -> dict[str, int]:
    return {
        gpu[:128]: tokens
        for gpu, tokens in found.items()
        if type(tokens) is int and 0 < tokens <= MAX_INTEGER
    }


def _ends(found: Object) -> Object:
    """Lists of two lists, by pod UID. All are dropped where one is unreadable: counting starts
    again."""
    try:
        return {
            uid[:MAX_KEY]: {
                "failed": [int(n) for n in failed][-MAX_ENDS:],
                "oomKilled": [int(n) for n in killed][-MAX_ENDS:],
            }
            for uid, (failed, killed) in list(found.items())[:MAX_PODS]
        }
    except (ValueError, TypeError):
        return {}
