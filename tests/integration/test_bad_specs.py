"""Kinds of bad spec, one after another on one service under a real operator: none takes traffic,
and what serves keeps its budget and its replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rolling import Service, up_to_date

from kvline_contract.exits import ExitCode
from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

Act = Callable[[Service, dict[str, Any]], None]
BUDGET = 4096
SHORT = (3891, 3000, 2048, 64)  # 3892 is 95 % of it, rounded up


def measures(tokens: int) -> Act:
    return lambda service, pod: service.node.play(State.VALIDATED, tokens, only=lambda p: p == pod)


def ends(code: int) -> Act:
    """The container ends with this exit code, at each poll once more."""
    return lambda service, pod: service.node.crash(pod, code, f"code {code}")


def says(raw: bytes) -> Act:
    """The pod is Ready for Kubernetes, as no real one would be, but its report is invalid."""
    return lambda service, pod: service.node.play(
        State.VALIDATED, raw=raw, ready=False, only=lambda p: p == pod
    )


def waits(reason: str) -> Act:
    container = {
        "name": "server",
        "ready": False,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"waiting": {"reason": reason, "message": "as the kubelet says"}},
    }
    status = {"phase": "Pending", "containerStatuses": [container]}
    return lambda service, pod: service.node.patch(pod, status)


def no_node(service: Service, pod: dict[str, Any]) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    full = {**condition, "message": "0/3 nodes are available"}
    service.node.patch(pod, {"phase": "Pending", "conditions": [full]})


def kinds() -> dict[str, Act]:
    found: dict[str, Act] = {f"measures {n}": measures(n) for n in SHORT}
    found |= {f"ends with {c.title}": ends(c) for c in ExitCode if c}
    found |= {
        "garbage for a report": says(b"{}"),
        "no report": says(b"<html>"),
        "no image": waits("ErrImagePull"),
        "no secret": waits("CreateContainerConfigError"),
        "no node": no_node,
    }
    return found


def wanted(name: str) -> str:
    """Only a measured shortfall or the engine's own failure rejects; everything else holds."""
    code = next((c for c in ExitCode if name == f"ends with {c.title}"), None)
    rejects = name.startswith("measures") or (code is not None and code.rejects)
    return "RevisionRejected" if rejects else "GateHeld"


def test_no_bad_spec_takes_traffic_or_capacity(service: Service) -> None:
    """F36, F37: more than twenty bad specs, each right after the other."""
    first = service.stable()
    assert len(kinds()) >= 20
    for number, (name, act) in enumerate(kinds().items()):
        service.space.apply(replicas=2, engine={"maxModelLen": 300 + number})
        generation = service.generation()

        def settled(
            status: dict[str, Any], act: Act = act, name: str = name, seen: int = generation
        ) -> bool:
            candidate = status["rollout"].get("candidateRevision")
            if candidate and status["observedGeneration"] == seen:
                for pod in service.pods_of(candidate):
                    act(service, pod)
            same = status["observedGeneration"] == seen
            return same and up_to_date(status).get("reason") == wanted(name)

        status = service.until(settled)
        assert status["rollout"]["stableRevision"] == first, name
        assert status["capacity"]["kvTokens"] == BUDGET, name
        assert status["readyReplicas"] == 2, name
    assert service.served == {first}
    assert service.fewest_ready == 2
