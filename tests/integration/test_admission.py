"""What refuses or changes the operator's writes on their way into the API server: webhooks, quotas,
a LimitRange and Pod Security. Each is named, and none is fought against."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import Operator, Space, serve
from waiting import settles
from webhook import CHILDREN, NAME, Webhook

from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
Object = dict[str, Any]


@pytest.fixture
def webhook(space: Space, tmp_path: Path) -> Iterator[Webhook]:
    made = Webhook(space, tmp_path)
    yield made
    made.remove()
    made.close()


def events(space: Space, reason: str) -> list[str]:
    return [e["message"] for e in space.list("events") if e["reason"] == reason]


@pytest.mark.parametrize("kinds", [CHILDREN, ("events", *CHILDREN)], ids=["children", "events-too"])
def test_a_dead_webhook_is_named_in_the_status_and_does_not_stop_it(
    space: Space, webhook: Webhook, operator: Operator, until: Callable[..., Any], kinds: Any
) -> None:
    """F62: a new service has a status with the cause, an event where that may be written, and a
    line in the log; the operator asks again with a growing delay."""
    webhook.close()
    webhook.install(*kinds)
    space.apply()
    until(lambda: space.condition("Progressing").get("reason") == "WebhookUnavailable", 60)
    for kind in ("Progressing", "Ready"):
        assert f'failed calling webhook "{NAME}"' in space.condition(kind)["message"]
    assert (space.get("kvl", "chat") or {})["status"]["reason"] == "WebhookUnavailable"
    assert space.condition("Reconciling")["status"] == "True"
    assert len(events(space, "WebhookUnavailable")) == (1 if kinds == CHILDREN else 0)
    assert f'failed calling webhook "{NAME}"' in operator.log.read_text()
    version = (space.get("kvl", "chat") or {})["metadata"]["resourceVersion"]
    tried = operator.reconciles
    until(lambda: operator.reconciles > tried, 90)
    assert (space.get("kvl", "chat") or {})["metadata"]["resourceVersion"] == version
    webhook.remove()
    until(lambda: space.list("deployments"), 90)
    until(lambda: space.condition("Progressing")["reason"] != "WebhookUnavailable", 60)


@pytest.mark.fault(
    "F76", shows="one event names webhook and object, and the status is written once it is gone"
)
def test_a_dead_webhook_that_keeps_the_status_away_is_named_in_an_event(
    space: Space, webhook: Webhook, operator: Operator, until: Callable[..., Any]
) -> None:
    webhook.close()
    webhook.install("inferenceservices/status")
    space.apply()
    until(lambda: events(space, "StatusNotWritten"), 60)
    (message,) = events(space, "StatusNotWritten")
    assert "chat/status" in message and f'failed calling webhook "{NAME}"' in message
    tried = operator.reconciles
    until(lambda: operator.reconciles > tried, 90)
    assert len(events(space, "StatusNotWritten")) == 1
    webhook.remove()
    until(lambda: space.condition("Accepted").get("status") == "True", 90)


def test_a_webhook_that_denies_is_no_missing_right(
    space: Space, webhook: Webhook, operator: Operator, until: Callable[..., Any]
) -> None:
    """F63: a denial is a 403 or a 400, and its text may have any word."""
    webhook.change = lambda body: None if body["kind"] == "Deployment" else []
    webhook.install()
    space.apply()
    until(lambda: space.condition("Progressing").get("reason") == "AdmissionDenied")
    assert "no quota of patience is left" in space.condition("Progressing")["message"]
    assert space.condition("Accepted")["status"] == "True"
    assert space.condition("Stalled")["reason"] == "AdmissionDenied"
    assert len(events(space, "AdmissionDenied")) == 1
    webhook.change = lambda body: []
    until(lambda: space.list("deployments"), 90)


def test_what_a_mutating_webhook_makes_of_a_child_stays_and_is_written_once(
    space: Space, webhook: Webhook, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F64: a registry's mirror, a pull policy, a sidecar and a label are the policy of the cluster,
    of which nothing is written again."""

    def change(body: Object) -> list[Object]:
        if body["kind"] != "Deployment":
            return []
        pod = "/spec/template/spec"
        image = body["spec"]["template"]["spec"]["containers"][0]["image"]
        mirrored = image if image.startswith("mirror/") else f"mirror/{image}"
        value = {"name": "mesh", "image": "mesh:1"}
        known = [c["name"] for c in body["spec"]["template"]["spec"]["containers"]]
        patch: list[Object] = [
            {"op": "replace", "path": f"{pod}/containers/0/image", "value": mirrored},
            {"op": "add", "path": f"{pod}/containers/0/imagePullPolicy", "value": "Always"},
            {"op": "add", "path": f"{pod}/terminationGracePeriodSeconds", "value": 77},
            {"op": "add", "path": "/spec/template/metadata/labels/team", "value": "x"},
        ]
        if "mesh" not in known:
            patch.append({"op": "add", "path": f"{pod}/containers/-", "value": value})
        return patch

    webhook.change = change
    webhook.install()
    serve(space, node)
    settles(operator.writes_nothing, seconds=60)
    (deployment,) = space.list("deployments")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"].startswith("mirror/")
    assert [c["name"] for c in pod["containers"]] == ["server", "mesh"]
    assert pod["terminationGracePeriodSeconds"] == 77
    for kind in ("Ready", "UpToDate"):
        assert space.condition(kind)["status"] == "True"
    assert not space.condition("Stalled")
    assert any(
        "terminationGracePeriodSeconds" in text for text in events(space, "AdmissionChanged")
    )
    assert not events(space, "ForeignChange") and not events(space, "ForeignChangeRemoved")
    before = deployment["metadata"]["generation"]
    operator.stop()
    webhook.remove()  # even so an operator that begins anew restarts no pod
    operator.start()
    until(operator.is_well)
    settles(operator.writes_nothing, seconds=60)
    assert space.list("deployments")[0]["metadata"]["generation"] == before
    space.apply(replicas=2)  # another wish is written all the same
    until(lambda: space.list("deployments")[0]["spec"]["replicas"] == 2)
    until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)
    (scaled,) = space.list("deployments")
    assert scaled["spec"]["template"] == deployment["spec"]["template"]


def test_a_limit_range_that_refuses_pods_is_no_quota(
    space: Space, operator: Operator, until: Callable[..., Any]
) -> None:
    """F65: not even where the service is named quota."""
    limits = [{"type": "Container", "max": {"memory": "1Gi"}}]
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}}
    space.kubectl("apply", "-f", "-", input=json.dumps({**body, "spec": {"limits": limits}}))
    space.apply("quota")
    reason = "LimitRangeViolated"
    until(lambda: space.condition("Progressing", "quota").get("reason") == reason, 60)
    message = space.condition("Progressing", "quota")["message"]
    assert "maximum memory usage per Container is 1Gi, but limit is 2Gi" in message


def test_under_pod_security_restricted_a_removed_false_comes_back(
    space: Space, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F66: its default is true, so no new pod would be admitted."""
    space.kubectl("label", "namespace", space.name, "pod-security.kubernetes.io/enforce=restricted")
    serve(space, node)
    name = space.list("deployments")[0]["metadata"]["name"]
    before = space.get("deployment", name)["spec"]["template"]  # type: ignore[index]
    path = "/spec/template/spec/containers/0/securityContext/allowPrivilegeEscalation"
    for change in ({"op": "remove"}, {"op": "replace", "value": True}):
        patch = json.dumps([{**change, "path": path}])
        space.kubectl("patch", "deployment", name, "--type=json", "-p", patch)
        until(lambda: space.get("deployment", name)["spec"]["template"] == before)  # type: ignore[index]
    until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)
    settles(operator.writes_nothing, seconds=60)


def test_a_service_selects_our_pods_that_are_ready_and_no_others(
    space: Space, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F67: what is added to a selector, and publishNotReadyAddresses, is removed and named."""
    serve(space, node)
    before = space.get("service", "chat")["spec"]  # type: ignore[index]
    change = {"spec": {"selector": {"team": "x"}, "publishNotReadyAddresses": True}}
    space.kubectl("patch", "service", "chat", "-p", json.dumps(change))
    until(lambda: space.get("service", "chat")["spec"] == before)  # type: ignore[index]
    (message,) = until(lambda: events(space, "ForeignChangeRemoved"))
    assert "spec.selector.team (set by kubectl-patch)" in message
    assert "spec.publishNotReadyAddresses (set by kubectl-patch)" in message
    policy = {"spec": {"podSelector": {"matchLabels": {"team": "x"}}}}
    space.kubectl("patch", "networkpolicy", "chat", "-p", json.dumps(policy))
    selector = {"matchLabels": {"kvline.dev/service": "chat"}}
    until(lambda: space.get("networkpolicy", "chat")["spec"]["podSelector"] == selector)  # type: ignore[index]
    settles(operator.writes_nothing, seconds=60)
