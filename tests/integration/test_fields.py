"""Every field of a spec, changed on a service that serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from playground import ROOT, Node

from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROLLS, STAYS = "rolls out", "stays"  # else: text of the error
DIGEST = "localhost/kvline-server@sha256:" + "a" * 64
SECRET = {"name": "s", "key": "k"}
HOST = "kubernetes.io/hostname"
SPREAD = {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# Applied in this order, each in addition to those before.
CHANGES: list[tuple[str, Any, str]] = [
    ("image", DIGEST, ROLLS),
    ("upgradePolicy", "Latest", "upgradePolicy Latest is for the operator's default image"),
    ("upgradePolicy", "Pinned", STAYS),
    ("restartedAt", "now", "spec.restartedAt"),
    ("restartedAt", "2026-11-26T12:00:00Z", ROLLS),
    ("model.source", "pvc://models/other", ROLLS),
    ("model.servedName", "other", ROLLS),
    ("model.loadFormat", "random", ROLLS),
    ("model.tokenSecretRef.name", "s", "tokenSecretRef"),
    ("model.tokenSecretRef.key", "k", "tokenSecretRef"),
    ("model.cache.claimName", "c", "cache is for hf:// sources"),
    ("replicas", 2, STAYS),
    ("drainSeconds", 4000, "spec.drainSeconds"),
    ("drainSeconds", 600, ROLLS),
    ("startupSeconds", 10, "spec.startupSeconds"),
    ("startupSeconds", 30000, ROLLS),
    ("imagePullSecrets", [{"name": "registry.example"}], ROLLS),
    ("serviceAccountName", "default", ROLLS),
    ("env", [{"name": "PATH", "value": "/tmp"}], "spec.env[0].name"),
    ("env", [{"name": "OMP_NUM_THREADS", "value": "2"}], ROLLS),
    ("resources.gpus", 9, "spec.resources.gpus"),
    ("resources.gpuResource", "nvidia.com/gpu.shared", "which is 0"),
    ("resources.gpuDeviceClass", "gpu.nvidia.com", "which is 0"),
    ("resources.cpu", "500m", ROLLS),
    ("resources.cpuLimit", "400m", "cpuLimit must be at least cpu"),
    ("resources.cpuLimit", 2, ROLLS),
    ("resources.ephemeralStorage", "1Gi", ROLLS),
    ("resources.sharedMemory", "3Gi", "sharedMemory must not exceed memory"),
    ("resources.sharedMemory", "128Mi", ROLLS),
    ("resources.memory", "3Gi", ROLLS),
    ("engine.maxModelLen", 512, ROLLS),
    ("engine.maxRunningRequests", 4, ROLLS),
    ("engine.maxPrefillTokens", 256, ROLLS),
    ("engine.maxTopLogprobs", 5, ROLLS),
    ("engine.kvCacheDtype", "fp16", "spec.engine.kvCacheDtype"),
    ("engine.kvCacheDtype", "fp8", ROLLS),
    ("engine.speculation", {"method": "Draft"}, "spec.engine.speculation.method"),
    ("engine.speculation", {"maxDraftTokens": 3}, "spec.engine.speculation.method"),
    (
        "engine.speculation",
        {"method": "NGram", "maxDraftTokens": 8},
        "spec.engine.speculation.maxDraftTokens",
    ),
    ("engine.speculation", {"method": "NGram"}, ROLLS),
    ("engine.speculation", {"method": "NGram", "maxDraftTokens": 3}, ROLLS),
    ("engine.speculation", {"method": "NGram", "maxSequences": 3}, ROLLS),
    ("engine.defaultMaxTokens", 0, "spec.engine.defaultMaxTokens"),
    ("engine.defaultMaxTokens", 1024, ROLLS),
    ("engine.toolCallParser", "hermes", "spec.engine.toolCallParser"),
    ("engine.toolCallParser", "Hermes", ROLLS),
    ("engine.prefixSnapshots", -1, "spec.engine.prefixSnapshots"),
    ("engine.prefixSnapshots", 64, ROLLS),
    ("engine.stateDtype", "fp8", "spec.engine.stateDtype"),
    ("engine.stateDtype", "bfloat16", ROLLS),
    ("engine.modalities", ["image"], "must have text"),
    ("engine.modalities", ["text", "video"], "spec.engine.modalities[1]"),
    ("engine.modalities", ["text", "image"], ROLLS),
    ("engine.maxImagesPerRequest", 65, "spec.engine.maxImagesPerRequest"),
    ("engine.maxImagesPerRequest", 8, ROLLS),
    ("engine.maxImagePatches", 3, "spec.engine.maxImagePatches"),
    ("engine.maxImagePatches", 4096, ROLLS),
    ("engine.modalities", ["text"], "set modalities to [text, image], or remove the bound"),
    ("capacity.minKVTokens", 2000, STAYS),
    ("capacity.minSequences", 5, "must not exceed engine.maxRunningRequests"),
    ("capacity.minSequences", 4, STAYS),
    ("capacity.kvTokens", 4096, ROLLS),
    ("capacity.headroomMiB", 64, ROLLS),
    ("capacity.reuse", "Never", STAYS),
    ("rollout.minCapacityPercent", 50, STAYS),
    ("rollout.progressDeadlineSeconds", 600, STAYS),
    ("rollout.onFailure", "Hold", STAYS),
    ("rollout.paused", True, STAYS),
    ("rollout.paused", False, STAYS),
    ("rollout.promote", "bbbbb", STAYS),
    ("scheduling.nodeSelector", {"disk": "fast"}, ROLLS),
    ("scheduling.tolerations", [{"key": "gpu", "operator": "Exists"}], ROLLS),
    ("scheduling.topologySpreadConstraints", [SPREAD], ROLLS),
    ("scheduling.affinity", {"podAntiAffinity": {REQUIRED: [{"topologyKey": HOST}]}}, ROLLS),
    ("scheduling.priorityClassName", "system-node-critical", "must not be one of the system's"),
    ("scheduling.runtimeClassName", "no name", "spec.scheduling.runtimeClassName"),
    ("podMetadata.labels", {"kvline.dev/service": "other"}, "must not be the operator's own"),
    ("podMetadata.labels", {"team": "search"}, ROLLS),
    ("podMetadata.annotations", {"a.kvline.dev/x": ""}, "must not be the operator's own"),
    ("podMetadata.annotations", {"sidecar.istio.io/inject": "false"}, ROLLS),
    ("access.tlsSecretRef.name", "Bad_Name", "spec.access.tlsSecretRef.name"),
    ("access.tlsSecretRef", {"name": "chat-tls"}, ROLLS),
    ("access.apiKeySecretRef.name", "s", "spec.access.apiKeySecretRef.key"),
    ("access.apiKeySecretRef", SECRET, ROLLS),
    ("access.apiKeySecretRef.key", "other", ROLLS),
    ("autoscaling.maxReplicas", 3, STAYS),
    ("autoscaling.minReplicas", 2, STAYS),
    ("autoscaling.targetPercent", 50, STAYS),
    ("autoscaling.scaleDownDelaySeconds", 1, STAYS),
    ("autoscaling.scaleUpPercent", 50, STAYS),
    (
        "rollout.strategy",
        "Recreate",
        STAYS,
    ),  # last, because every later change would wait for a Job
]


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    if "properties" not in schema:
        yield path
    for name, body in schema.get("properties", {}).items():
        yield from leaves(body, f"{path}.{name}" if path else name)


def is_below(leaf: str, paths: set[str]) -> bool:
    return any(leaf == path or leaf.startswith(f"{path}.") for path in paths)


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {**spec, name: changed(spec.get(name, {}), rest, value) if rest else value}


def test_each_field_rolls_out_or_stays_or_is_refused_by_name(
    space: Any, operator: Any, node: Node, until: Callable[..., Any]
) -> None:
    """C16: each field changed on a service that serves, and no change gets stuck; tokenSecretRef,
    cache, gpus, gpuResource, gpuDeviceClass, priorityClassName and runtimeClassName by a value that
    is refused."""
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    known = set(leaves(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    paths = {path for path, _, _ in CHANGES}
    assert {leaf for leaf in known if not is_below(leaf, paths)} == set()
    assert {path for path in paths if not any(is_below(leaf, {path}) for leaf in known)} == set()

    def settled() -> str:
        """Waits until one revision serves alone, and returns it."""
        node.play(State.VALIDATED)
        body = space.get("kvl", "chat")
        up = space.condition("UpToDate")
        same = up.get("observedGeneration") == body["metadata"]["generation"]
        return (
            str(body["status"]["rollout"]["stableRevision"])
            if same and up["status"] == "True"
            else ""
        )

    # Without a minimum another model could not be compared.
    spec: dict[str, Any] = {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi"},
        "capacity": {"minKVTokens": 1000},
    }
    space.apply(**spec)
    revision = until(settled, 60)
    for path, value, expected in CHANGES:
        wanted = changed(spec, path, value)
        done = space.apply(check=False, **wanted)
        if expected not in (ROLLS, STAYS):
            assert done.returncode != 0 and expected in done.stderr, (path, done.stderr)
            continue
        assert done.returncode == 0, (path, done.stderr)
        spec, before, revision = wanted, revision, until(settled, 60)
        assert (revision != before) == (expected == ROLLS), path
