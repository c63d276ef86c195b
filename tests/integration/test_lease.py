"""Two operators: one is active, one is standby, and writes based on old reads are refused."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground import Node, Operator, Space, serve
from waiting import limit, within

from kvline_contract.names import ANNOTATION_STATE, KIND, LABEL_SERVICE, records_name
from kvline_contract.report import State
from kvline_kubectl.cluster import connect
from kvline_operator.api.spec import parse
from kvline_operator.apply import ensure as apply
from kvline_operator.errors import Conflict
from kvline_operator.plan import render

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

HAND_OVER = 15.0  # seconds after the holder is killed


@pytest.fixture
def pair(space: Space, tmp_path: Path, until: Callable[..., Any]) -> Iterator[list[Operator]]:
    """The active operator and the standby."""
    first = Operator(space, tmp_path / "first.log").start()
    until(lambda: holder(space) == first.identity)
    second = Operator(space, tmp_path / "second.log").start()
    until(lambda: f"standing by: {first.identity} holds" in second.log.read_text())
    yield [first, second]
    for made in (first, second):
        if made.process is not None and made.process.poll() is None:
            made.stop()
        assert "Traceback" not in made.log.read_text()


def holder(space: Space) -> str:
    return str(space.lease.get("holderIdentity", ""))


def reaches(space: Space, node: Node, replicas: int) -> bool:
    node.play(State.VALIDATED)
    status = (space.get("kvl", "chat") or {}).get("status") or {}
    return status.get("readyReplicas") == replicas and space.up_to_date


def doubles(space: Space) -> list[tuple[str, str]]:
    """Events of the service that were sent twice; but each new pod has no node here at first."""
    ours = [e for e in space.list("events") if e["involvedObject"]["kind"] == KIND]
    sent = [(e["reason"], e["message"]) for e in ours]
    return [t for t in sent if sent.count(t) > 1 and t[0] != "Unschedulable"]


def test_one_acts_and_the_other_takes_over_when_it_dies_or_leaves(
    space: Space, node: Node, pair: list[Operator], until: Callable[..., Any]
) -> None:
    """F17."""
    first, second = pair
    serve(space, node)
    assert second.is_well()  # ready, and writes nothing
    assert first.metric("kvline_operator_active") == 1
    assert second.metric("kvline_operator_active") == second.writes == 0

    first.stop(signal.SIGKILL)
    died = time.monotonic()
    with within(HAND_OVER):
        space.apply(replicas=2)
        until(lambda: holder(space) == second.identity)
    taken = time.monotonic() - died
    until(lambda: reaches(space, node, 2))
    print(f"killed: taken over after {taken:.1f} s, done after {time.monotonic() - died:.1f} s")

    first.identity += "-anew"  # as if another pod had it
    first.start()
    until(lambda: f"standing by: {second.identity}" in first.log.read_text())
    left, process = time.monotonic(), second.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    with within(HAND_OVER / 3):  # from the signal: a pod has few seconds to end
        until(lambda: holder(space) == first.identity)
    print(f"left: taken over after {time.monotonic() - left:.1f} s")
    assert process.wait(limit(30)) == 0
    space.apply(replicas=1)
    until(lambda: reaches(space, node, 1))
    assert space.lease["leaseTransitions"] == 2
    assert doubles(space) == []


def test_one_that_was_stopped_for_a_while_writes_nothing_and_ends(
    space: Space, node: Node, pair: list[Operator], until: Callable[..., Any]
) -> None:
    """F17: an operator that was stopped for longer than its Lease writes nothing and exits."""
    first, second = pair
    serve(space, node)
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    space.apply(replicas=2)
    until(lambda: holder(space) == second.identity)
    until(lambda: reaches(space, node, 2))
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(limit(30)) == 1
    assert f"{second.identity} holds the lease now" in first.log.read_text()
    assert holder(space) == second.identity and doubles(space) == []
    assert len(node.pods()) == 2


def test_a_release_for_one_namespace_has_it_and_the_operator_of_the_cluster_leaves_it_alone(
    space: Space, node: Node, operator: Operator, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """F17: in namespaces of their own they share no Lease; the RoleBinding of the second says whose
    the services are, while its Lease is renewed, and taking it away gives them back."""
    serve(space, node)
    home = f"{space.name}-ops"
    space.cluster.kubectl("create", "namespace", home)
    release = chart(home, space.name)
    space.cluster.kubectl("apply", "-f", "-", input=release)
    account = space.cluster.kubeconfig_of(home, "kvline-operator")
    theirs = Operator(space, tmp_path / "theirs.log", {"KVLINE_NAMESPACE": home}, account)
    theirs.words = ["--lease-name", "kvline-operator"]  # the chart's
    left = f"namespace {space.name} belongs to the operator in {home} (by its RoleBinding)"

    def is_logged(text: str) -> bool:
        space.kubectl("annotate", "kvl", "chat", f"touched={time.monotonic()}", "--overwrite")
        return f"{left}{text}" in operator.log.read_text()

    # Nobody of that release runs yet. A ConfigMap, which `edit` may make, says nothing.
    until(lambda: is_logged(", which does not renew its Lease"))
    space.apply(replicas=2)
    until(lambda: reaches(space, node, 2))
    space.apply(replicas=1)
    until(lambda: reaches(space, node, 1))
    try:
        theirs.start()
        until(lambda: is_logged(": left to it"))
        before = operator.writes
        space.apply(replicas=2)
        until(lambda: reaches(space, node, 2))
        assert operator.writes == before and theirs.writes > 0
        assert left not in theirs.log.read_text() and doubles(space) == []
    finally:
        theirs.stop()
    space.cluster.kubectl("delete", "-f", "-", input=release)
    space.apply(replicas=1)
    until(lambda: reaches(space, node, 1), 60)
    assert operator.writes > before
    space.cluster.kubectl("delete", "namespace", home, "--wait=false")


def chart(home: str, looked_after: str) -> str:
    """What a release brings along besides its Deployment."""
    import helm

    helm.ensure(print)
    words = ["--namespace", home, "--kube-version", helm.KUBERNETES]
    words += ["--values", "manifests/install-values.yaml"]
    for value in (f"namespaces={{{looked_after}}}", "createNamespace=false"):
        words += ["--set", value]
    made = yaml.safe_load_all(helm.helm("template", "kvline", "charts/kvline", *words))
    return yaml.safe_dump_all([d for d in made if d and d["kind"] != "Deployment"])


def test_memory_is_written_over_nothing_but_what_was_read(
    space: Space, node: Node, operator: Operator, until: Callable[..., Any]
) -> None:
    """F05, F17: writes of an operator that read before another one wrote are refused."""
    serve(space, node)
    operator.stop()
    kube = connect(None, str(space.cluster.kubeconfig), space.name).kube
    body = kube.get(KIND, space.name, "chat")
    assert body is not None
    spec = parse(body)
    (stored,) = kube.select("ControllerRevision", space.name, f"{LABEL_SERVICE}=chat")
    name = stored["metadata"]["name"]
    theirs = f"{ANNOTATION_STATE}=theirs"
    space.kubectl("annotate", "controllerrevision", name, "--overwrite", theirs)
    mine = render.with_annotations(spec, stored, {ANNOTATION_STATE: "ours"})
    with pytest.raises(Conflict):
        kube.apply(mine, over=stored, exact=True)
    now = space.get("controllerrevision", name)
    assert now is not None and now["metadata"]["annotations"][ANNOTATION_STATE] == "theirs"

    records = space.get("configmap", records_name("chat"))
    assert records is not None
    records |= {"apiVersion": "v1", "kind": "ConfigMap"}
    space.kubectl("annotate", "configmap", records_name("chat"), "touched=yes")
    with pytest.raises(Conflict):
        apply.ensure(kube, render.records_map(spec, {}), records, exact=True)
    later = space.get("configmap", records_name("chat"))
    assert later is not None and later["data"] == records["data"]

    space.kubectl("annotate", "kvl", "chat", "touched=yes")
    with pytest.raises(Conflict):
        kube.replace_status(space.name, "chat", {}, body["metadata"]["resourceVersion"])
    assert (space.get("kvl", "chat") or {})["status"]

    # Deleted and created again, it is another object.
    space.kubectl("delete", "controllerrevision", name)
    with pytest.raises(Conflict):
        kube.apply(mine, over=stored)
    assert space.get("controllerrevision", name) is None
