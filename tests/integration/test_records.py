"""Recorded sizes in the cluster: written once, changed by nobody else, reported when they drift."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playground import serve

from kvline_contract.report import State

pytestmark = pytest.mark.integration


def kept(space: Any) -> dict[str, Any]:
    found = space.get("configmap", "chat-records") or {}
    return dict(json.loads((found.get("data") or {}).get("records.json", "{}")))


def test_a_validated_size_is_kept_for_the_next_replica_and_moves_no_pod(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    serve(space, node)
    until(lambda: space.condition("CapacityStable").get("reason") == "Stable")
    assert kept(space)["records"]["f" * 32]["kvTokens"] == 4096
    pods = [p["metadata"]["uid"] for p in node.pods()]
    space.apply(capacity={"reuse": "Never"})
    until(lambda: kept(space)["reuse"] == "Never")
    assert [p["metadata"]["uid"] for p in node.pods()] == pods


def test_a_replica_that_measures_less_is_reported_with_both_figures(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    serve(space, node)
    until(lambda: kept(space))
    space.kubectl("scale", "kvl", "chat", "--replicas=2")
    until(lambda: len(node.pods()) == 2)
    first = {p["metadata"]["uid"] for p in node.pods() if p["metadata"]["uid"] in node.addresses}
    node.play(State.VALIDATED, 3900, only=lambda pod: pod["metadata"]["uid"] not in first)
    until(lambda: space.condition("CapacityStable").get("reason") == "Drifted")
    message = space.condition("CapacityStable")["message"]
    assert "3900" in message and "4096" in message and "-4.8 %" in message
    assert kept(space)["records"]["f" * 32]["kvTokens"] == 4096
    assert "Drifted" in {e["reason"] for e in space.list("events")}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", "not a JSON document"),
        ('{"version": 9, "records": {}}', "records of version 9"),
    ],
)
def test_a_damaged_record_is_written_anew_and_named(
    space: Any, operator: Any, node: Any, until: Callable[..., Any], text: str, named: str
) -> None:
    serve(space, node)
    until(lambda: kept(space))
    broken = json.dumps({"data": {"records.json": text}})
    space.kubectl("patch", "configmap", "chat-records", "--type=merge", "-p", broken)

    def whole() -> bool:
        found = space.get("configmap", "chat-records")
        return found is not None and found["data"]["records.json"] != text

    until(whole)
    assert kept(space)["records"]["f" * 32]["kvTokens"] == 4096
    assert "chat-records is measured and written anew: " in (log := operator.log.read_text())
    assert named in log
