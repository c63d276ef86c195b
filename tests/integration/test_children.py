"""Child objects that are changed, deleted or foreign: ours are restored, others are not touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playground import Operator, children, serve
from proxy import Proxy
from waiting import limit, settles

from kvline_contract.names import LABEL_SERVICE
from kvline_contract.report import State
from kvline_kubectl.cluster import connect
from kvline_operator.apply.drift import LIMIT
from kvline_operator.errors import Conflict
from kvline_operator.observe import ownership

pytestmark = pytest.mark.integration


def test_drift_is_repaired_and_foreign_fields_stay(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F22, F25, L08."""
    space.apply()
    name = until(lambda: [d["metadata"]["name"] for d in space.list("deployments")])[0]
    evil = [
        {"op": "replace", "path": "/spec/replicas", "value": 0},
        {"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "evil:1"},
        {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["sleep"]},
        {"op": "add", "path": "/metadata/annotations/theirs", "value": "kept"},
    ]
    space.kubectl("patch", "deployment", name, "--type=json", "-p", json.dumps(evil))

    def repaired() -> bool:
        d = space.get("deployment", name)
        container = d["spec"]["template"]["spec"]["containers"][0]
        return bool(
            d["spec"]["replicas"] == 1
            and container["image"] == "localhost/kvline-server:test"
            and container["args"][0] == "serve"
        )

    until(repaired)
    assert space.get("deployment", name)["metadata"]["annotations"]["theirs"] == "kept"
    gate = f"{name}-gate"
    space.kubectl("patch", "configmap", gate, "--type=merge", "-p", '{"data":{"gate.json":"{}"}}')
    until(lambda: '"open":true' in space.get("configmap", gate)["data"]["gate.json"])
    space.kubectl("delete", "service", "chat")
    until(lambda: space.get("service", "chat"))


def test_labels_and_owners_that_were_taken_come_back(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F23, F24, L08."""
    space.apply()
    until(lambda: space.get("service", "chat"))
    name = until(lambda: [d["metadata"]["name"] for d in space.list("deployments")])[0]
    space.kubectl("label", "deployment", name, "kvline.dev/service-")
    take = '[{"op":"remove","path":"/metadata/ownerReferences"}]'
    space.kubectl("patch", "service", "chat", "--type=json", "-p", take)
    until(lambda: "ownerReferences" in space.get("service", "chat")["metadata"])
    until(lambda: "kvline.dev/service" in space.get("deployment", name)["metadata"]["labels"])
    assert len(space.list("deployments")) == 1


def test_a_revision_that_lost_its_label_keeps_its_state(
    space: Any, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F23: the acceptance and the baseline are in its annotations, and no list has it."""
    serve(space, node)
    settles(operator.writes_nothing, seconds=60)
    (before,) = space.list("controllerrevisions")
    pods = {p["metadata"]["uid"] for p in node.pods()}
    space.kubectl("label", "controllerrevision", before["metadata"]["name"], "kvline.dev/service-")
    until(lambda: LABEL_SERVICE in space.list("controllerrevisions")[0]["metadata"]["labels"])
    until(lambda: space.up_to_date)
    settles(operator.writes_nothing, seconds=60)
    (after,) = space.list("controllerrevisions")
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert {p["metadata"]["uid"] for p in node.pods()} == pods


def test_a_foreign_object_with_a_child_s_name_is_left_alone(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F24, C23."""
    space.kubectl("create", "service", "clusterip", "chat", "--tcp=80:80")
    before = space.get("service", "chat")
    space.apply()
    until(lambda: space.condition("Accepted").get("reason") == "NameConflict")
    assert "Service chat exists" in space.condition("Ready")["message"]
    assert space.get("service", "chat") == before
    space.kubectl("delete", "service", "chat")
    until(lambda: space.condition("Accepted").get("status") == "True")


def test_what_is_made_anew_takes_nothing_over(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F24 again, for each kind of child: an object that appears between reads and writes."""
    space.apply()
    until(lambda: space.list("deployments"))
    kube = connect(None, str(space.cluster.kubeconfig), space.name).kube
    for kind in (kind for kind in ownership.CHILDREN if kind != "Pod"):
        name = kube.select(kind, space.name, LABEL_SERVICE)[0]["metadata"]["name"]
        there = kube.get(kind, space.name, name)
        assert there is not None
        taken = {"name": name, "namespace": space.name, "labels": {"taken": "over"}}
        body = {"apiVersion": there["apiVersion"], "kind": kind, "metadata": taken}
        with pytest.raises(Conflict):
            kube.apply(body, anew=True)
        now = kube.get(kind, space.name, name)
        assert now is not None and now["metadata"]["labels"] == there["metadata"]["labels"], kind


def test_deletion_needs_no_operator_and_leaves_nothing(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F02: deletion completes while the operator is down."""
    space.apply()
    until(lambda: space.list("deployments"))
    operator.stop()
    space.kubectl("delete", "kvl", "chat", f"--timeout={limit(20):.0f}s")
    # In a new cluster Kubernetes' garbage collector finds our kind within 30 s of its definition.
    until(lambda: not any(children(space).values()), 90, on="garbage collector")
    space.apply("late")
    space.apply("late", engine={"maxModelLen": 4096})
    operator.start()
    until(lambda: space.list("deployments"))
    launch = space.get("configmap", space.list("deployments")[0]["metadata"]["name"])
    assert "4096" in launch["data"]["launch.json"]
    assert len(space.list("deployments")) == 1


def test_a_child_deleted_while_the_operator_was_away_comes_back(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F03."""
    space.apply()
    until(lambda: space.list("deployments"))
    operator.stop()
    space.kubectl("delete", "deployment,service", "--all")
    operator.start()
    until(lambda: space.list("deployments") and space.get("service", "chat"), 30)


@pytest.mark.parametrize("resync", [2])
def test_a_foreign_finalizer_on_a_child_makes_no_loop_and_no_second_one(
    space: Any, behind: Operator, proxy: Proxy, until: Callable[..., Any]
) -> None:
    """F26, C18."""
    space.apply()
    name = until(lambda: [d["metadata"]["name"] for d in space.list("deployments")])[0]
    hold = '{"metadata":{"finalizers":["example.com/hold"]}}'
    space.kubectl("patch", "deployment", name, "--type=merge", "-p", hold)
    space.kubectl("delete", "kvl", "chat", "--wait=false")
    until(lambda: space.get("kvl", "chat") is None)
    # The garbage collector looks for kinds that are new to it every 30 seconds.
    until(lambda: held(space, name), 90, on="garbage collector")
    proxy.await_resync()  # by then a reconcile that was under way has ended
    written = behind.writes
    proxy.await_resync()  # which finds what no event has reported
    assert behind.writes == written
    assert [d["metadata"]["name"] for d in space.list("deployments")] == [name]
    free = '{"metadata":{"finalizers":null}}'
    space.kubectl("patch", "deployment", name, "--type=merge", "-p", free)
    until(lambda: not any(children(space).values()), on="garbage collector")


def held(space: Any, deployment: str) -> bool:
    """Whether it is deleted but for a finalizer, and the other children are gone."""
    left = [item for items in children(space).values() for item in items]
    names = [item["metadata"]["name"] for item in left]
    return names == [deployment] and "deletionTimestamp" in left[0]["metadata"]


def test_a_change_while_deleting_creates_nothing(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """C18."""
    space.apply()
    until(lambda: space.list("deployments"))
    hold = '{"metadata":{"finalizers":["example.com/hold"]}}'
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", hold)
    space.kubectl("delete", "kvl", "chat", "--wait=false")
    until(lambda: space.get("kvl", "chat")["metadata"].get("deletionTimestamp"))
    space.kubectl("delete", "deployment", "--all")
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", '{"spec":{"replicas":3}}')
    operator.acts_once_more()
    assert space.list("deployments") == []
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')


def foreign_events(space: Any, reason: str) -> list[str]:
    return [e["message"] for e in space.list("events") if e["reason"] == reason]


def test_what_others_put_into_pods_is_taken_away_and_named(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """F22: additions to a pod template would restart pods past the gate; server-side apply alone
    merges lists and would keep them."""
    serve(space, node)
    name = space.list("deployments")[0]["metadata"]["name"]
    before = space.get("deployment", name)["spec"]["template"]
    space.kubectl("set", "env", f"deployment/{name}", "SPY=1")
    space.kubectl("rollout", "restart", f"deployment/{name}")
    spy = {"spec": {"template": {"spec": {"initContainers": [{"name": "spy", "image": "spy:1"}]}}}}
    space.kubectl("patch", "deployment", name, "-p", json.dumps(spy))
    dns = {"spec": {"template": {"spec": {"dnsPolicy": "Default"}}}}  # another has the default
    space.kubectl("patch", "deployment", name, "-p", json.dumps(dns))
    ports: list[dict[str, Any]] = [{"op": "add", "path": "/spec/type", "value": "NodePort"}]
    port = {"name": "more", "port": 9, "protocol": "TCP"}
    ports += [{"op": "add", "path": "/spec/ports/-", "value": port}]
    space.kubectl("patch", "service", "chat", "--type=json", "-p", json.dumps(ports))

    def clean() -> bool:
        service = space.get("service", "chat")["spec"]
        return (
            space.get("deployment", name)["spec"]["template"] == before
            and [p["name"] for p in service["ports"]] == ["api"]
            and service["type"] == "NodePort"
        )

    until(clean)
    until(lambda: "initContainers" in " ".join(foreign_events(space, "ForeignChangeRemoved")))
    messages = " ".join(foreign_events(space, "ForeignChangeRemoved"))
    assert "spec.template.spec.containers[server].env[SPY] (set by kubectl-set)" in messages
    assert all(w in messages for w in ("annotations", "initContainers", "(set by kubectl-patch)"))
    until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)
    settles(operator.writes_nothing, seconds=60)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("service", "/spec/ports/0/port", 9000),
        ("service", "/spec/ports/0/protocol", "UDP"),
        ("deployment", "/spec/template/spec/containers/0/name", "another"),
    ],
)
@pytest.mark.fault(
    "F74",
    shows="the port, its protocol and the container have their keys back, and an event names who "
    "changed them",
)
def test_the_only_item_of_a_list_gets_its_key_back(
    space: Any,
    operator: Any,
    node: Any,
    until: Callable[..., Any],
    kind: str,
    path: str,
    value: Any,
) -> None:
    """Under another key it is another item: both cannot be there at once, and none may not be."""
    serve(space, node)
    (name,) = (o["metadata"]["name"] for o in space.list(kind + "s"))
    before = space.get(kind, name)["spec"]
    change = [{"op": "replace", "path": path, "value": value}]
    space.kubectl("patch", kind, name, "--type=json", "-p", json.dumps(change))
    until(lambda: space.get(kind, name)["spec"] == before)
    until(
        lambda: "(set by kubectl-patch)" in " ".join(foreign_events(space, "ForeignChangeRemoved"))
    )
    assert space.condition("Accepted")["status"] == "True"


def test_one_who_puts_it_back_each_time_wins_after_a_while_and_is_named(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """F22: one who changes it back each time is named, and after five times the change stays:
    endless rollouts would be worse."""
    serve(space, node)
    name = space.list("deployments")[0]["metadata"]["name"]
    env = [{"name": "SPY", "value": "1"}]
    pod = {"containers": [{"name": "server", "env": env}]}
    body: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"template": {"spec": pod}},
    }
    added = 0

    def meddle() -> bool:
        nonlocal added
        (server,) = space.get("deployment", name)["spec"]["template"]["spec"]["containers"]
        if "SPY" not in [e["name"] for e in server["env"]]:
            words = ("apply", "--server-side", "--field-manager=meddler", "-f", "-")
            space.kubectl(*words, input=json.dumps(body))
            added += 1
        node.play(State.VALIDATED)
        return bool(space.condition("UpToDate").get("reason") == "ForeignChange")

    until(meddle, 60)
    assert LIMIT <= added <= LIMIT + 1
    assert "(set by meddler)" in space.condition("UpToDate")["message"]
    assert space.condition("Ready")["status"] == "True"
    assert len(foreign_events(space, "ForeignChange")) == 1
    until(lambda: node.play(State.VALIDATED) or len(node.pods()) == 1)
    settles(operator.writes_nothing, seconds=60)
    assert space.condition("UpToDate")["reason"] == "ForeignChange"
    # A change of the spec removes the foreign variable too.
    space.apply(replicas=2)
    until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)


def owners_of(space: Any) -> dict[str, set[str]]:
    """By UID of the owner, kinds and names of children; the UID is empty where there is none."""
    out: dict[str, set[str]] = {}
    for kind, items in children(space).items():
        for meta in (item["metadata"] for item in items):
            for owner in meta.get("ownerReferences") or [{"uid": ""}]:
                out.setdefault(owner["uid"], set()).add(f"{kind}/{meta['name']}")
    return out


def test_orphaned_children_are_the_service_s_again(
    space: Any, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F68: the baseline is kept, pods run on, and the other revision is owned, then pruned."""
    serve(space, node)
    rollout = space.get("kvl", "chat")["status"]["rollout"]
    stable = rollout["stableRevision"]
    served = {p["metadata"]["uid"] for p in node.pods()}
    longer = {"engine": {"maxModelLen": 4096}}
    space.apply(**longer)
    until(lambda: len(space.list("deployments")) == 2 and len(node.pods()) == 2)
    space.kubectl("delete", "kvl", "chat", "--cascade=orphan", f"--timeout={limit(60):.0f}s")
    left = owners_of(space)
    assert left.keys() == {""}
    space.apply(**longer)
    uid = space.get("kvl", "chat")["metadata"]["uid"]
    until(lambda: owners_of(space) == {uid: left[""]})
    status = until(lambda: space.get("kvl", "chat").get("status"))
    assert status["rollout"]["stableRevision"] == stable
    assert status["rollout"]["candidateRevision"] != stable
    assert served < {p["metadata"]["uid"] for p in node.pods()}
    assert space.condition("Ready")["status"] == "True"
    until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)
    until(lambda: len(space.list("deployments")) == 1)
    status = space.get("kvl", "chat")["status"]
    assert stable in status["rollout"]["gate"]["message"] or status["rollout"]["gate"]["baseline"]
    settles(operator.writes_nothing, seconds=60)
