"""The child objects of a service, as plain dicts. Pure and deterministic.

A revision's pod template and launch file are rendered once and stored in its ControllerRevision, so
that an upgrade of the operator restarts no pod, and drift is corrected to what was first written.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from kvline_contract import names
from kvline_contract.codec import dumps
from kvline_contract.launch import (
    VERSION,
    CapacityOptions,
    Device,
    EngineOptions,
    GateFile,
    Images,
    KVCacheDtype,
    LaunchConfig,
    LoadFormat,
    Model,
    Record,
    StateDtype,
    ToolCallParser,
)
from kvline_operator.api.inputs import read
from kvline_operator.api.source import Download, source_of
from kvline_operator.api.spec import ServiceSpec, gpus, ranks, speculation
from kvline_operator.plan.autoscale import Scale
from kvline_operator.plan.podspec import GPU_CLAIM, download_container, pod_template
from kvline_operator.plan.revisions import Revision
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.settings import Settings
from kvline_operator.store.records import text

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The service that child objects are named after, labelled with and owned by."""

    namespace: str
    name: str
    uid: str
    base: str

    @classmethod
    def of(cls, spec: ServiceSpec) -> Owner:
        return cls(spec.namespace, spec.name, spec.uid, spec.base)


def metadata(owner: Owner, name: str, revision: str | None = None) -> Object:
    labels = {names.LABEL_SERVICE: owner.base, names.LABEL_MANAGED_BY: names.MANAGED_BY}
    if revision is not None:
        labels[names.LABEL_REVISION] = revision
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels,
        "ownerReferences": [
            {
                "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
                "kind": names.KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
            }
        ],
    }


def service_objects(spec: ServiceSpec, settings: Settings, hub_ports: list[int]) -> list[Object]:
    """Objects that exist once for a service. `hub_ports`: as RolloutState has them."""
    owner = Owner.of(spec)
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(owner, owner.base),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(owner, owner.base),
            "spec": {
                "selector": {names.LABEL_SERVICE: owner.base},
                "ports": [
                    {
                        "name": "api",
                        "port": names.API_PORT,
                        "targetPort": "api",
                        "protocol": "TCP",
                    }
                ],
            },
        },
        network_policy(owner, settings, hub_ports),
    ]


def disruption_budget(spec: ServiceSpec, plan: RolloutPlan) -> Object:
    """One serving replica may be evicted at a time; a replica that does not serve always may.

    minAvailable and not maxUnavailable: the latter counts against the desired replicas of all
    selected Deployments, so that a candidate held at its gate, or a pod that cannot be scheduled,
    would block every drain."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(owner, owner.base),
        "spec": {
            "minAvailable": max(0, min(spec.replicas, plan.serving) - 1),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {names.LABEL_SERVICE: owner.base}},
        },
    }


def records_map(spec: ServiceSpec, records: dict[str, Record]) -> Object:
    """Recorded sizes for pods to start from. Not part of a revision: changes restart no pod."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, names.records_name(owner.base)),
        "data": {names.RECORDS_FILE: text(records, spec.reuse)},
    }


def scale_map(spec: ServiceSpec, scale: Scale) -> Object:
    """The state of the autoscaler."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, names.scale_name(owner.base)),
        "data": {names.SCALE_FILE: scale.dumps()},
    }


def network_policy(owner: Owner, settings: Settings, hub_ports: list[int]) -> Object:
    """Ingress: the API from the service's own namespace and those of clients; the internal port
    from the operator's namespace and those that may read metrics. Egress: none, except the hub's
    ports where pods download, the collector's port where they trace, and DNS for either."""
    clients = [{"podSelector": {}}, *_namespaces(settings.client_namespaces)]
    readers = _namespaces((settings.own_namespace, *settings.metrics_namespaces))
    ports = [*hub_ports, *([settings.traces_port] if settings.traces_endpoint else [])]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, owner.base),
        "spec": {
            "podSelector": {"matchLabels": {names.LABEL_SERVICE: owner.base}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": clients,
                    "ports": [{"protocol": "TCP", "port": names.API_PORT}],
                },
                {
                    "from": readers,
                    "ports": [{"protocol": "TCP", "port": names.INTERNAL_PORT}],
                },
            ],
            "egress": egress(ports, settings.mesh_namespaces),
        },
    }


def egress(ports: list[int], meshes: tuple[str, ...]) -> list[Object]:
    """Rules for these TCP ports anywhere, for all of these namespaces, and for DNS; none where
    there is neither."""
    dns = [{"protocol": p, "port": 53} for p in ("UDP", "TCP")]
    tcp = [{"protocol": "TCP", "port": port} for port in ports]
    rules = [{"ports": tcp}] if tcp else []
    rules += [{"to": _namespaces(meshes)}] if meshes else []
    return [{"ports": dns}, *rules] if rules else []


def _namespaces(names: tuple[str, ...]) -> list[Object]:
    label = "kubernetes.io/metadata.name"
    return [{"namespaceSelector": {"matchLabels": {label: name}}} for name in names]


def controller_revision(spec: ServiceSpec, revision: Revision, settings: Settings) -> Object:
    """A revision's inputs and image, with the pod template and launch file rendered from them."""
    owner = Owner.of(spec)
    data: Object = {
        "inputs": spec.inputs,
        "image": revision.image,
        "servedName": spec.served_name,
        **({"imageNamed": True} if revision.named else {}),
        **({"images": revision.images} if revision.images else {}),
        "podTemplate": pod_template(owner.base, spec, revision, settings),
    }
    if spec.source.download is Download.JOB:
        data["download"] = download_container(spec.source, revision.image, settings)
    if spec.device_class:
        data["claimTemplate"] = claim_template(spec.inputs["resources"])
    data["launch"] = launch_config(owner, revision.name, data).dumps()
    return _controller_revision(owner, revision.name, revision.number, data, {})


def with_annotations(spec: ServiceSpec, stored: Object, annotations: dict[str, str]) -> Object:
    """A stored ControllerRevision with other annotations."""
    name = stored["metadata"]["labels"][names.LABEL_REVISION]
    return _controller_revision(
        Owner.of(spec), name, stored["revision"], stored["data"], annotations
    )


def _controller_revision(
    owner: Owner, name: str, number: int, data: Object, annotations: dict[str, str]
) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            **metadata(owner, names.revision_name(owner.base, name), name),
            "annotations": {names.ANNOTATION_IMAGE: data["image"], **annotations},
        },
        "revision": number,
        "data": data,
    }


def revision_objects(
    spec: ServiceSpec, stored: Object, replicas: int, gate: GateFile, launch: str
) -> list[Object]:
    """A revision's ConfigMaps, ResourceClaimTemplate and Deployment, from its ControllerRevision
    and launch file."""
    owner = Owner.of(spec)
    revision = stored["metadata"]["labels"][names.LABEL_REVISION]
    name = names.revision_name(owner.base, revision)
    claim = stored["data"].get("claimTemplate")
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(owner, name, revision),
            "immutable": True,
            "data": {names.LAUNCH_FILE: launch},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(owner, names.gate_name(owner.base, revision), revision),
            "data": {names.GATE_FILE: dumps(gate)},
        },
        *([{**claim, "metadata": metadata(owner, name, revision)}] if claim else []),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(owner, name, revision),
            "spec": {
                "replicas": replicas,
                "revisionHistoryLimit": 0,
                "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
                "selector": {
                    "matchLabels": {
                        names.LABEL_SERVICE: owner.base,
                        names.LABEL_REVISION: revision,
                    }
                },
                "template": stored["data"]["podTemplate"],
            },
        },
    ]


def claim_template(asked: Object) -> Object:
    """The ResourceClaimTemplate from which each pod gets a claim of its own, but for metadata."""
    exactly = {"deviceClassName": asked["gpuDeviceClass"], "count": asked["gpus"]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "spec": {"spec": {"devices": {"requests": [{"name": GPU_CLAIM, "exactly": exactly}]}}},
    }


def launch_text(spec: ServiceSpec, stored: Object, live: Object | None) -> str:
    """The launch file that a revision was created with. ControllerRevisions of earlier operators
    lack it and are immutable: there it is taken from the live ConfigMap, which is immutable too, so
    that any other content would be refused."""
    kept = stored["data"].get("launch") or ((live or {}).get("data") or {}).get(names.LAUNCH_FILE)
    if kept:
        return str(kept)
    name = stored["metadata"]["labels"][names.LABEL_REVISION]
    return launch_config(Owner.of(spec), name, stored["data"]).dumps()


def launch_config(owner: Owner, revision: str, data: Object) -> LaunchConfig:
    """The pod's launch configuration, from the revision's stored inputs. `data` of earlier
    operators has no `images`: their pods serve text alone."""
    inputs = read(data["inputs"])
    model, engine = inputs["model"], inputs.get("engine", {})
    capacity = inputs.get("capacity", {})
    source = source_of(model)
    return LaunchConfig(
        version=VERSION,
        namespace=owner.namespace,
        service=owner.base,
        revision=revision,
        image=data["image"],
        device=Device.CUDA if gpus(inputs["resources"]) else Device.CPU,
        tensor_parallel=ranks(inputs["resources"]),
        model=Model(
            source=source.text,
            path=f"{names.MODELS_DIR}/{source.path}",
            served_name=data["servedName"],
            load_format=LoadFormat(model.get("loadFormat", "weights")),
        ),
        engine=EngineOptions(
            engine.get("maxModelLen"),
            engine.get("maxRunningRequests"),
            engine.get("maxPrefillTokens"),
            engine.get("maxTopLogprobs"),
            KVCacheDtype(engine["kvCacheDtype"]) if "kvCacheDtype" in engine else None,
            speculation(engine) if "speculation" in engine else None,
            engine.get("defaultMaxTokens"),
            ToolCallParser(engine["toolCallParser"]) if "toolCallParser" in engine else None,
            engine.get("prefixSnapshots"),
            StateDtype(engine["stateDtype"]) if "stateDtype" in engine else None,
            Images(data["images"]) if data.get("images") else None,
            engine.get("maxImagesPerRequest"),
            engine.get("maxImagePatches"),
        ),
        capacity=CapacityOptions(capacity.get("kvTokens"), capacity.get("headroomMiB")),
        require_api_key="apiKeySecretRef" in inputs.get("access", {}),
        require_tls="tlsSecretRef" in inputs.get("access", {}) or None,
        drain_seconds=inputs.get("drainSeconds"),
        environment={item["name"]: item["value"] for item in inputs.get("env", [])} or None,
        cpu_limit=inputs["resources"].get("cpuLimit"),
    )


def event(owner: Owner, what: tuple[str, str, str], version: str, time: str) -> Object:
    """An Event of the service; `what` is reason, type and message. Its name is a hash of them and
    of the service's resourceVersion, never of the time."""
    reason, kind, message = what
    digest = hashlib.sha256(f"{owner.uid}{version}{reason}{message}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{owner.base}.{digest}", "namespace": owner.namespace},
        "involvedObject": {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": names.KIND,
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        },
        "reason": reason,
        "type": kind,
        "message": message[:1024],
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
    }
