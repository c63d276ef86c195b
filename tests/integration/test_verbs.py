"""Fields of the spec that ask for an act, with a real API server and operator: what Flux does to
them, what removing them does, and what the operator refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playground import Space, manifest
from rolling import Service, up_to_date
from test_predecessor import replaced

from kvline_contract.report import Termination

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

FLUX = "kustomize-controller"
SMALLER: dict[str, Any] = {"engine": {"maxModelLen": 512}}


def union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two sets of fields."""
    return {k: union(one.get(k, {}), other.get(k, {})) for k in {*one, *other}}


def flux_applies(space: Space, **spec: Any) -> None:
    """As Flux does: fields of managers whose name begins with kubectl become its own first, so that
    those which Git lacks are removed by the apply."""
    live = space.kubectl("get", "kvl", "chat", "-o", "json", "--show-managed-fields", check=False)
    if live.returncode == 0:
        entries = json.loads(live.stdout)["metadata"]["managedFields"]
        mine = next(m for m in entries if (m["manager"], m["operation"]) == (FLUX, "Apply"))
        theirs = [m for m in entries if m["manager"].startswith("kubectl")]
        for entry in theirs:
            mine["fieldsV1"] = union(mine["fieldsV1"], entry["fieldsV1"])
        kept = [m for m in entries if m not in theirs]
        patch = [{"op": "replace", "path": "/metadata/managedFields", "value": kept}]
        space.kubectl("patch", "kvl", "chat", "--type=json", "-p", json.dumps(patch))
    words = ("apply", "--server-side", "--force-conflicts", f"--field-manager={FLUX}", "-f", "-")
    space.kubectl(*words, input=manifest("chat", **spec))


def written(space: Space) -> dict[str, Any]:
    found = space.get("kvl", "chat")
    assert found is not None
    return dict(found["spec"])


def patched(space: Space, **spec: Any) -> None:
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))


def pods(service: Service) -> set[str]:
    return {p["metadata"]["uid"] for p in service.node.pods()}


def test_flux_leaves_what_the_plugin_wrote_and_takes_what_kubectl_wrote(
    space: Space, operator: Any
) -> None:
    flux_applies(space)
    space.kvline("pause", "chat")
    space.kvline("restart", "chat")
    asked = written(space)["restartedAt"]
    flux_applies(space)
    assert written(space)["rollout"] == {"paused": True}
    assert written(space)["restartedAt"] == asked
    space.kvline("resume", "chat")
    patched(space, rollout={"paused": True})
    flux_applies(space)
    assert "rollout" not in written(space), "of kubectl's own managers nothing stays"
    of_git = "2026-01-01T00:00:00Z"
    flux_applies(space, restartedAt=of_git)
    assert written(space)["restartedAt"] == of_git, "what Git has is Git's"


def test_a_restart_goes_through_the_gate_and_removing_the_field_restarts_nothing(
    service: Service, space: Space
) -> None:
    first, before = service.stable(), pods(service)
    done = json.loads(space.kvline("restart", "chat", "-o", "json").stdout)
    status = service.poll()
    assert status["observedGeneration"] >= done["generation"] == service.generation()
    second = service.candidate()
    service.tokens[second] = 4096
    service.until(lambda s: s["rollout"]["stableRevision"] == second)
    service.until_reason("UpToDate")
    after = pods(service)
    assert not before & after and second != first and service.fewest_ready == 2

    patched(space, restartedAt=None)
    service.until(lambda s: s["observedGeneration"] == service.generation())
    service.until_reason("UpToDate")
    assert (pods(service), service.stable()) == (after, second)


def test_a_restart_tries_a_rejected_revision_again(service: Service, space: Space) -> None:
    space.apply(replicas=2, **SMALLER)
    rejected = service.candidate()
    service.tokens[rejected] = 1000
    service.until_reason("RevisionRejected")
    space.kvline("pause", "chat")
    space.kvline("resume", "chat")
    status = service.until_reason("RevisionRejected")
    assert status["rollout"]["rejectedRevision"] == rejected, "a pause tries nothing again"
    space.kvline("restart", "chat")
    again = service.candidate()
    service.tokens[again] = 4096
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == again != rejected


def test_a_promotion_of_what_was_never_measured_is_refused(service: Service, space: Space) -> None:
    """By the plugin before it writes, and by the operator where Git asks for it."""
    first = service.stable()
    space.apply(replicas=2, **SMALLER)
    candidate = service.candidate()
    (pod,) = service.until_pods(candidate, 1)
    for _ in range(2):
        service.node.crash(pod, 40, Termination(1, 40, "OutOfMemory", "40 MiB short").dumps())
        service.until(lambda s: s.get("diagnosis", {}).get("code") == 40)
    service.until_reason("RevisionRejected")
    asked = space.kvline("promote", "chat", check=False)
    assert asked.returncode == 1 and f"no replica of revision {candidate} has been" in asked.stderr
    patched(space, rollout={"promote": candidate})
    status = service.until_reason("PromotionRefused")
    message = up_to_date(status)["message"]
    assert f"revision {candidate} is not promoted" in message
    assert "ever measured" in message and "40 MiB short" in message
    assert service.events("PromotionRefused") == [message]
    assert (status["rollout"]["stableRevision"], status["readyReplicas"]) == (first, 2)


def test_a_promotion_does_not_outlive_a_rollback(service: Service, space: Space) -> None:
    """Though Git has the field: the revision has to pass its gate when it comes back."""
    first = service.stable()
    space.apply(replicas=2, **SMALLER)
    smaller = service.candidate()
    service.tokens[smaller] = 1000
    service.until_reason("RevisionRejected")
    promoted: dict[str, Any] = {"rollout": {"promote": smaller}}
    space.apply(replicas=2, **SMALLER, **promoted)
    service.until(lambda s: s["rollout"]["stableRevision"] == smaller)
    service.until_reason("UpToDate")
    space.apply(replicas=2, **promoted)  # the old spec
    service.until(lambda s: s["rollout"]["stableRevision"] == first)
    service.until_reason("UpToDate")
    space.apply(replicas=2, **SMALLER, **promoted)
    status = service.until_reason("PromotionRefused")
    assert "has accepted it once" in up_to_date(status)["message"]
    assert (status["rollout"]["stableRevision"], status["readyReplicas"]) == (first, 2)
    space.apply(replicas=2, **SMALLER)
    service.until_reason("RevisionRejected")
    space.apply(replicas=2, **SMALLER, **promoted)  # set again
    service.until(lambda s: s["rollout"]["stableRevision"] == smaller)


def test_what_annotations_asked_of_an_earlier_operator_restarts_no_pod(
    service: Service, space: Space, operator: Any
) -> None:
    """Its revision has inputs `restart` and `upgrade`, which no field gives any more; neither the
    operator's upgrade nor the annotations' removal moves a pod."""
    before, noon = pods(service), "2026-11-26T12:00:00Z"
    operator.stop()
    (listed,) = space.list("controllerrevisions")
    listed["data"]["inputs"] |= {"restart": noon, "upgrade": noon}
    replaced(
        space,
        "controllerrevision",
        {"apiVersion": "apps/v1", "kind": "ControllerRevision", **listed},
    )
    verbs = [f"kvline.dev/{verb}" for verb in ("restart", "upgrade")]
    space.kubectl("annotate", "kvl", "chat", *(f"{verb}={noon}" for verb in verbs))
    operator.start()
    patched(space, capacity={"minKVTokens": 1})
    service.until(lambda s: s["observedGeneration"] == service.generation())
    space.kubectl("annotate", "kvl", "chat", *(f"{verb}-" for verb in verbs))
    patched(space, restartedAt=noon)  # as the documentation advises
    service.until(lambda s: s["observedGeneration"] == service.generation())
    service.until_reason("UpToDate")
    assert pods(service) == before and len(space.list("controllerrevisions")) == 1
