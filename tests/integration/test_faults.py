"""Faults around an operator: a right taken away, a quota used up, a second operator, things written
that are none of its business."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crd
import pytest
import yaml
from playground import Operator, identity, manifest, serve
from waiting import limit

from kvline_contract.names import CRD_SCHEMA, CRD_TITLE
from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ACCOUNT = "kvline-operator"


def rights(space: Any, without: str = "") -> str:
    """The operator's rights as a Role of the namespace; without those on one resource."""
    shipped = next(d for d in identity() if d["kind"] == "ClusterRole")
    lease = next(d for d in identity() if d["metadata"]["name"] == "kvline-operator-lease")
    rules = list(json.loads(json.dumps([*shipped["rules"], *lease["rules"]])))
    for rule in rules:
        if without in rule["resources"]:
            rule["verbs"] = [v for v in rule["verbs"] if v in ("get", "list", "watch")]
    where = {"namespace": space.name}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, **where}
    group = "rbac.authorization.k8s.io"
    return yaml.safe_dump_all(
        [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
            {
                "apiVersion": f"{group}/v1",
                "kind": "Role",
                "metadata": {"name": ACCOUNT},
                "rules": rules,
            },
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": ACCOUNT},
                "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
                "subjects": [subject],
            },
        ]
    )


def both_serve(space: Any, node: Any) -> bool:
    """Validates new pods; true once all of the service is ready."""
    node.play(State.VALIDATED)
    ready = space.get("kvl", "chat")["status"].get("readyReplicas")
    return bool(ready == 2 and space.up_to_date)


@pytest.fixture
def limited(space: Any, tmp_path: Path) -> Iterator[Operator]:
    """An operator whose only rights are that Role."""
    space.kubectl("apply", "-f", "-", input=rights(space))
    account = space.cluster.kubeconfig_of(space.name, ACCOUNT)
    made = Operator(space, tmp_path / "operator.log", kubeconfig=account)
    made.extra = {"KVLINE_NAMESPACE": space.name}
    yield made
    made.stop()
    assert "Traceback" not in made.log.read_text()


def test_a_right_that_is_missing_is_named_and_coming_back_is_enough(
    space: Any, limited: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F15."""
    space.kubectl("apply", "-f", "-", input=rights(space, without="deployments"))
    limited.start()
    space.apply()
    until(lambda: space.condition("Accepted").get("reason") == "Forbidden")
    message = space.condition("Accepted")["message"]
    assert "Deployment" in message or "ControllerRevision" in message
    assert "PATCH" in message and "HTTP 403" in message
    assert space.get("service", "chat") is not None  # other kinds are written all the same
    space.kubectl("apply", "-f", "-", input=rights(space))
    until(lambda: node.pods(), 60)
    until(lambda: space.condition("Accepted").get("status") == "True")


def test_a_used_up_quota_is_reported_and_room_is_enough(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """F28."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"count/deployments.apps": "0"}},
    }
    space.kubectl("apply", "-f", "-", input=json.dumps(quota))
    until(lambda: "used" in (space.get("resourcequota", "small").get("status") or {}))
    space.apply()
    until(lambda: space.condition("Progressing").get("reason") == "QuotaExceeded")
    assert "count/deployments.apps=0" in space.condition("Progressing")["message"]
    space.kubectl("delete", "resourcequota", "small")
    until(lambda: space.list("deployments"), 60)
    until(lambda: space.condition("Progressing").get("reason") != "QuotaExceeded", 60)


def test_annotations_of_others_have_no_effect(
    space: Any, operator: Any, node: Any, until: Callable[..., Any], tmp_path: Path
) -> None:
    """C20: an annotation of 250 kB, and kopf's own."""
    serve(space, node)
    before = [p["metadata"]["uid"] for p in node.pods()]
    foreign = {"big": "x" * 250_000, "kopf.zalando.org/last-handled-configuration": "{}"}
    file = tmp_path / "patch.json"
    file.write_text(json.dumps({"metadata": {"annotations": foreign}}))
    space.kubectl("patch", "kvl", "chat", "--type=merge", f"--patch-file={file}")
    space.apply(replicas=2)
    until(lambda: both_serve(space, node))
    assert before[0] in [p["metadata"]["uid"] for p in node.pods()]
    assert space.get("kvl", "chat")["metadata"]["annotations"]["big"] == foreign["big"]
    assert "finalizers" not in space.get("kvl", "chat")["metadata"]


@pytest.mark.parametrize(
    ("id", "spec", "words"),
    [
        ("C09", {"env": [{"name": "LD_PRELOAD", "value": "/x"}]}, "spec.env[0].name"),
        ("C09", {"podTemplate": {}}, 'unknown field "spec.podTemplate"'),
        (
            "C19",
            {"scheduling": {"tolerations": [{"key": f"k{n}"} for n in range(10_000)]}},
            "spec.scheduling.tolerations",
        ),
        (
            "C19",
            {"scheduling": {"nodeSelector": {f"k{n}": "v" for n in range(17)}}},
            "spec.scheduling.nodeSelector",
        ),
        ("C19", {"scheduling": {"nodeSelector": {"-bad-": "v"}}}, "nodeSelector keys"),
        ("C25", {"engine": {"maxModelLen": "1_000"}}, "spec.engine.maxModelLen"),
        ("C25", {"replicas": True}, "spec.replicas"),
        ("C25", {"model": {"source": "pvc://models/x", "servedName": 2026}}, "servedName"),
    ],
)
def test_what_a_spec_cannot_contain(space: Any, id: str, spec: dict[str, Any], words: str) -> None:
    refused = space.kubectl("apply", "-f", "-", input=manifest("chat", **spec), check=False)
    assert refused.returncode != 0 and words in refused.stderr, refused.stderr[-600:]


def test_an_api_that_is_taken_away_and_comes_back(
    space: Any, node: Any, until: Callable[..., Any], tmp_path: Path
) -> None:
    """F18: without the CRD the operator logs that and exits, at each restart; when the CRD is back
    it serves again."""
    operator = Operator(space, tmp_path / "operator.log").start()
    serve(space, node)
    space.cluster.kubectl("delete", "-f", str(crd.FILE))
    try:
        for line in (
            "the watch ended: ",
            "the CustomResourceDefinition of serving.kvline.dev is not inst",
        ):
            assert operator.process is not None and operator.process.wait(limit(90)) == 1
            assert line in operator.log.read_text().splitlines()[-1]
            operator.start()
        operator.stop()
    finally:
        crd.define(space.cluster.kubectl)
    # Kubernetes first collects the old service's objects.
    operator.start()
    try:
        space.apply()
        until(lambda: node.play(State.VALIDATED) or space.up_to_date, 90, on="garbage collector")
    finally:
        operator.stop()


@pytest.mark.parametrize("number", ["", "serving.kvline.dev schema 0"])
def test_an_older_definition_is_refused_with_both_numbers(
    space: Any, node: Any, until: Callable[..., Any], tmp_path: Path, number: str
) -> None:
    """F19: the start ends in 30 s; with today's definition the same operator serves."""
    raw = ("get", "--raw", "/openapi/v3/apis/serving.kvline.dev/v1alpha1")
    now = f'"{CRD_TITLE}{CRD_SCHEMA}"'
    older = tmp_path / "crd.yaml"
    older.write_text(crd.FILE.read_text().replace(f"title: {now[1:-1]}", f'title: "{number}"'))
    operator = Operator(space, tmp_path / "operator.log")
    space.cluster.kubectl("apply", "--server-side", "-f", str(older))
    try:
        until(lambda: now not in space.cluster.kubectl(*raw).stdout)
        process = operator.start().process
        assert process is not None and process.wait(limit(30)) == 1
        last = operator.log.read_text().splitlines()[-1]
        assert f"needs schema {CRD_SCHEMA} of serving.kvline.dev/v1alpha1" in last
        assert ("the cluster has 0" if number else "one without a number") in last
    finally:
        space.cluster.kubectl("apply", "--server-side", "-f", str(crd.FILE))
    operator.start()
    try:
        serve(space, node)
    finally:
        operator.stop()


def test_a_namespace_goes_with_all_that_is_ours_and_without_a_storm(
    space: Any, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """F27, L08."""
    serve(space, node)
    wait = f"--timeout={limit(120):.0f}s"
    space.cluster.kubectl("delete", "namespace", space.name, wait)
    lines = operator.log.read_text().splitlines()
    assert len([line for line in lines if " WARNING " in line or " ERROR " in line]) <= 10
