"""Bad resources are refused by the API server, with the field named: the catalogue's C rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crd
import pytest
from errors import ClusterError

pytestmark = pytest.mark.integration
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "a" * 64
GPU = {"memory": "2Gi", "gpus": 1}
CPU_RANKS = {"memory": "256Mi", "gpuResource": "kvline.dev/cpu-rank"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/server"


def refused(space: Any, named: str, manifest: str) -> None:
    done = space.kubectl("apply", "-f", "-", input=manifest, check=False)
    assert done.returncode != 0, manifest[:200]
    assert named in done.stderr, done.stderr
    assert space.list("kvl") == []


def body(**change: Any) -> str:
    spec: dict[str, Any] = {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi"},
        **change,
    }
    return json.dumps(
        {
            "apiVersion": "serving.kvline.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("C02", {"replcas": 2}, "replcas"),
    ("C03", {"replicas": -1}, "spec.replicas"),
    ("C03", {"replicas": 1.5}, "spec.replicas"),
    ("C03", {"replicas": "3"}, "spec.replicas"),
    ("C03", {"replicas": 10**9}, "spec.replicas"),
    ("C08", {"image": "repo/server:latest"}, "spec.image"),
    ("C08", {"image": "--flag"}, "spec.image"),
    ("C10", {"resources": {"memory": "2Gi", "gpus": -1}}, "spec.resources.gpus"),
    ("C10", {"resources": {"memory": "2Gi", "gpus": 0.5}}, "spec.resources.gpus"),
    ("C10", {"resources": {"memory": "2Gi", "gpus": "two"}}, "spec.resources.gpus"),
    ("C10", {"resources": {"memory": "2Gi", "gpus": 9}}, "spec.resources.gpus"),
    ("C10", {"resources": {**GPU, "memory": "2047Mi"}}, "memory must be at least 2Gi of host"),
    (
        "C10",
        {"resources": {"memory": "15Gi", "gpus": 8}},
        "2Gi of host memory for each of gpus",
    ),
    ("C10", {"resources": {**CPU_RANKS, "gpus": 9}}, "spec.resources.gpus"),
    ("C10", {"resources": {**CPU_RANKS, "gpus": 0}}, "which is 0"),
    ("C10", {"resources": {**GPU, "gpuResource": "gpu"}}, "spec.resources.gpuResource"),
    ("C10", {"resources": {**GPU, "gpuResource": "kubernetes.io/gpu"}}, "a device plug-in's"),
    (
        "C10",
        {"resources": {**GPU, "gpuDeviceClass": "GPU/nvidia"}},
        "spec.resources.gpuDeviceClass",
    ),
    (
        "C10",
        {"resources": {"memory": "2Gi", "gpuDeviceClass": "gpu.nvidia.com"}},
        "gpuDeviceClass names the class of the GPUs that gpus counts, which is 0",
    ),
    (
        "C10",
        {
            "resources": {
                **GPU,
                "gpuResource": "nvidia.com/gpu",
                "gpuDeviceClass": "gpu.nvidia.com",
            }
        },
        "gpuDeviceClass and gpuResource exclude each other",
    ),
    ("C10", {"resources": {"memory": "2Gi", "sharedMemory": "1GB"}}, "sharedMemory"),
    ("C11", {"podMetadata": {"labels": {"a b": "c"}}}, "must be label keys"),
    ("C11", {"podMetadata": {"labels": {"pod-template-hash": "c"}}}, "a Deployment's"),
    ("C22", {"podMetadata": {"annotations": {APPARMOR: "unconfined"}}}, "security profile"),
    ("C22", {"scheduling": {"priorityClassName": "system-node-critical"}}, "the system's"),
    ("C14", {"engine": {"maxModelLen": 0}}, "spec.engine.maxModelLen"),
    ("C14", {"engine": {"maxModelLen": -1}}, "spec.engine.maxModelLen"),
    ("C14", {"engine": {"maxModelLen": 2**31}}, "spec.engine.maxModelLen"),
    ("C14", {"engine": {"maxModelLen": 2**63}}, "maxModelLen"),
    ("C15", {"capacity": {"headroomMiB": -1}}, "spec.capacity.headroomMiB"),
    ("C15", {"capacity": {"headroomMiB": 0.9}}, "spec.capacity.headroomMiB"),
    ("C15", {"capacity": {"kvTokens": 0}}, "spec.capacity.kvTokens"),
    ("C15", {"capacity": {"kvTokens": "90"}}, "spec.capacity.kvTokens"),
    ("C15", {"capacity": {"kvTokens": 10**18}}, "spec.capacity.kvTokens"),
    ("C15", {"capacity": {"minKVTokens": 0}}, "spec.capacity.minKVTokens"),
    ("C15", {"capacity": {"minSequences": 0}}, "spec.capacity.minSequences"),
    ("C22", {"hostNetwork": True}, "hostNetwork"),
    ("C22", {"serviceAccountName": "../x"}, "serviceAccountName"),
    ("C22", {"env": [{"name": "LD_PRELOAD", "value": "x"}]}, "spec.env[0].name"),
    ("C22", {"env": [{"name": "HF_TOKEN", "value": "x"}]}, "spec.env[0].name"),
    ("C22", {"env": [{"name": "TZ", "valueFrom": {"secretKeyRef": {}}}]}, "spec.env[0]"),
    ("quantity", {"resources": {"memory": "2Gi", "cpu": 2, "cpuLimit": "1500m"}}, "at least cpu"),
    ("C22", {"template": {"spec": {"volumes": []}}}, "template"),
    ("CEL", {"engine": {"maxRunningRequests": 64, "maxPrefillTokens": 32}}, "maxPrefillTokens"),
    ("CEL", {"capacity": {"kvTokens": 100, "minKVTokens": 200}}, "minKVTokens"),
    ("CEL", {"capacity": {"kvTokens": 100}, "engine": {"maxModelLen": 200}}, "kvTokens"),
    ("rollout", {"rollout": {"strategy": "BlueGreen"}}, "spec.rollout.strategy"),
    ("rollout", {"rollout": {"minCapacityPercent": 101}}, "spec.rollout.minCapacityPercent"),
    (
        "rollout",
        {"rollout": {"progressDeadlineSeconds": 1}},
        "spec.rollout.progressDeadlineSeconds",
    ),
    ("rollout", {"rollout": {"onFailure": "Panic"}}, "spec.rollout.onFailure"),
    ("rollout", {"rollout": {"steps": [10]}}, "steps"),
    ("rollout", {"rollout": {"paused": "true"}}, "spec.rollout.paused"),
    ("rollout", {"rollout": {"promote": "chat-bbbbb"}}, "spec.rollout.promote"),
    ("verbs", {"restartedAt": "today"}, "spec.restartedAt"),
    ("verbs", {"upgradePolicy": "Always"}, "spec.upgradePolicy"),
    ("unbuilt", {"autoscaling": {"minReplicas": 1}}, "autoscaling"),
    ("C03", {"access": {}}, "access must have apiKeySecretRef or tlsSecretRef"),
    ("C03", {"access": {"apiKeySecretRef": {"name": "a"}}}, "spec.access.apiKeySecretRef.key"),
    ("C03", {"access": {"apiKeySecretRef": {"name": "A", "key": "b"}}}, "apiKeySecretRef.name"),
    ("quantity", {"resources": {"memory": "2Gi", "cpu": 0}}, "must be greater than 0"),
    ("quantity", {"resources": {"memory": "2Gi", "cpu": "1.2345"}}, "spec.resources.cpu"),
    ("quantity", {"resources": {"memory": "2Gi", "cpu": True}}, "spec.resources.cpu"),
    ("quantity", {"resources": {"memory": "2Gi", "ephemeralStorage": "0Gi"}}, "ephemeralStorage"),
]


@pytest.mark.parametrize(
    ("id", "change", "named"), BAD, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_bad_field_is_refused_by_name(
    space: Any, id: str, change: dict[str, Any], named: str
) -> None:
    refused(space, named, body(**change))


@pytest.mark.parametrize("gpus", range(9))
def test_any_number_of_gpus_up_to_eight_is_accepted_with_2gi_for_each(
    space: Any, gpus: int
) -> None:
    given = [{"memory": f"{2 * gpus or 1}Gi", "gpus": gpus}]
    given += [{**CPU_RANKS, "gpus": gpus}] if gpus else []
    for resources in given:
        space.kubectl("apply", "--dry-run=server", "-f", "-", input=body(resources=resources))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "../x",
        "/abs",
        "https://host/model",
        "--flag",
        "hf://org/name\nx",
        "$(HOSTNAME)",
        ";id",
        "x" * 10_000,
        "hf://\u043erg/name@" + COMMIT,
        "hf://org/name",
        "hf://org/name@main",
        "hf://org/name@0123456",
        "hf://org/name@" + COMMIT.upper(),
        "hf://org/name@" + COMMIT + "0",
        "pvc://models",
        "pvc://models/../etc",
        "pvc://Models/x",
        "pvc://models/.hidden",
    ],
)
def test_a_bad_source_is_refused(space: Any, source: str) -> None:
    """C06, C07, C11."""
    manifest = body(model={"source": source})
    refused(space, "spec.model.source", manifest)
    if len(source) < 400:  # rules are not run on what is too long
        refused(space, "must be hf://OWNER/NAME@COMMIT with the 40 hex digits", manifest)


@pytest.mark.parametrize("memory", ["-1", "1e99", "0", "1 Gi", "1E", "128Mi", "2gi"])
def test_a_bad_quantity_is_refused(space: Any, memory: str) -> None:
    """C13."""
    refused(space, "spec.resources", body(resources={"memory": memory}))


@pytest.mark.parametrize(
    "resources",
    [
        {"memory": "1.5Gi", "cpu": 2},
        {"memory": 2147483648, "cpu": "1.5", "sharedMemory": "64Mi"},
        {"memory": "2048Mi", "cpu": "1500m", "ephemeralStorage": "0.5Gi"},
    ],
)
def test_a_quantity_is_a_number_or_text_as_in_a_pod(space: Any, resources: dict[str, Any]) -> None:
    space.apply(resources=resources)
    assert space.get("kvl", "chat")["spec"]["resources"] == resources


def test_references_have_the_names_that_kubernetes_gives_objects(space: Any) -> None:
    """Secrets and claims are named as DNS subdomains, and a Secret's keys have up to 253
    characters."""
    source, long = f"hf://o/n@{COMMIT}", "n" * 253
    model = {
        "source": source,
        "tokenSecretRef": {"name": "hub.example.com", "key": "k" * 253},
        "cache": {"claimName": "models.v2"},
    }
    access = {"tlsSecretRef": {"name": long}, "apiKeySecretRef": {"name": "a.b", "key": ".key"}}
    space.apply(model=model, access=access)
    space.apply(model={"source": "pvc://models.v2/tiny"})


@pytest.mark.parametrize("name", ["1chat", "my.chat", "c" * 41, "chat-"])
def test_a_name_that_a_service_cannot_have_is_refused(space: Any, name: str) -> None:
    made = json.loads(body())
    made["metadata"]["name"] = name
    refused(space, "metadata.name", json.dumps(made))


@pytest.mark.parametrize("spec", ["absent", {}, None])
def test_an_empty_spec_is_refused(space: Any, spec: Any) -> None:
    """C01."""
    made = json.loads(body())
    if spec == "absent":
        del made["spec"]
    else:
        made["spec"] = spec
    refused(space, "spec", json.dumps(made))


def test_secrets_of_other_namespaces_cannot_be_named(space: Any) -> None:
    """C11."""
    for name in ("other/name", "With-Capitals", "a..b"):
        model = {"source": f"hf://o/n@{COMMIT}", "tokenSecretRef": {"name": name, "key": "k"}}
        refused(space, "tokenSecretRef.name", body(model=model))
    model = {"source": "pvc://models/x", "tokenSecretRef": {"name": "a", "key": "k"}}
    refused(space, "tokenSecretRef is for hf:// sources", body(model=model))


def test_a_huge_object_is_refused_by_its_fields_bounds(space: Any) -> None:
    """C21: just below etcd's limit, so that the schema answers and names the field."""
    megabyte = "x" * 1_400_000
    refused(
        space, "spec.model.servedName", body(model={"source": "pvc://m/x", "servedName": megabyte})
    )
    refused(space, "nodeSelector", body(scheduling={"nodeSelector": {"key": megabyte}}))
    tolerations = [{"key": "k" * 60, "value": "v" * 60} for _ in range(9000)]
    refused(space, "spec.scheduling.tolerations", body(scheduling={"tolerations": tolerations}))


def test_a_dry_run_writes_nothing(space: Any, operator: Any, until: Callable[..., Any]) -> None:
    """C26."""
    space.apply("other")
    until(lambda: space.list("deployments"))
    space.kubectl("apply", "--dry-run=server", "-f", "-", input=body())
    operator.acts_once_more("other")  # its changes reach the operator after those of a dry run
    assert [item["metadata"]["name"] for item in space.list("kvl")] == ["other"]
    assert len(space.list("deployments")) == 1
    about = [e["involvedObject"]["name"] for e in space.list("events")]
    assert not [name for name in about if name.startswith("chat")]


def test_a_definition_is_waited_for_from_before_it_has_conditions() -> None:
    """`kubectl wait` fails while a new definition has no conditions, a moment too short to
    reproduce; the answers here are recorded from such a run."""
    early = "error: .status.conditions accessor error: <nil> is of the type <nil>"
    answers = [early, "", "False", "True"]

    def kubectl(*words: str) -> subprocess.CompletedProcess[str]:
        answer = "" if words[0] == "apply" else answers.pop(0)
        if answer == early:
            raise ClusterError(answer)
        return subprocess.CompletedProcess(words, 0, answer, "")

    crd.define(kubectl)
    assert answers == []


def test_every_sample_is_accepted(space: Any) -> None:
    root = Path(__file__).resolve().parents[2]
    for sample in sorted((root / "manifests" / "samples").glob("*.yaml")):
        space.kubectl("apply", "--dry-run=server", "-f", str(sample))


def test_scale_has_its_subresource_and_its_bound(space: Any) -> None:
    space.kubectl("apply", "-f", "-", input=body())
    space.kubectl("scale", "kvl", "chat", "--replicas=3")
    assert space.get("kvl", "chat")["spec"]["replicas"] == 3
    done = space.kubectl("scale", "kvl", "chat", "--replicas=5000", check=False)
    assert "1000" in done.stderr
    shown = " ".join(space.kubectl("explain", "kvl.spec.capacity").stdout.split())
    assert "One that measures fewer does not become ready" in shown
