"""Plan: the objects a service should have, as plain dicts. Pure; the same input, the same bytes.

A revision's pod template is rendered once, kept in its ControllerRevision and never rendered
again, so that an operator upgrade moves no pod and drift is repaired to what was first written.
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
    LaunchConfig,
    LoadFormat,
    Model,
    Record,
)
from kvline_operator.autoscale import Scale
from kvline_operator.podspec import pod_template
from kvline_operator.records import text
from kvline_operator.revisions import Revision
from kvline_operator.settings import Settings
from kvline_operator.spec import ServiceSpec, parse_source

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """What children are named, labelled and owned by."""

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


def service_objects(spec: ServiceSpec, settings: Settings) -> list[Object]:
    """What exists once a service, whatever its revisions."""
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
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(owner, owner.base),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": {names.LABEL_SERVICE: owner.base}},
            },
        },
        network_policy(owner, spec, settings),
    ]


def records_map(spec: ServiceSpec, records: dict[str, Record]) -> Object:
    """The sizes that pods may start from. Outside every revision: it moves no pod."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, names.records_name(owner.base)),
        "data": {names.RECORDS_FILE: text(records, spec.reuse)},
    }


def scale_map(spec: ServiceSpec, scale: Scale) -> Object:
    """What the autoscaler remembers."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, names.scale_name(owner.base)),
        "data": {names.SCALE_FILE: scale.dumps()},
    }


def network_policy(owner: Owner, spec: ServiceSpec, settings: Settings) -> Object:
    """In: the API from this namespace and those of clients, the internal port from the operator's
    and from those that may read metrics. Out: nothing, but for a hub source the hub's port, for
    traces the collector's, and DNS for either (a policy knows pods, not containers)."""
    clients = [{"podSelector": {}}, *_namespaces(settings.client_namespaces)]
    readers = _namespaces((settings.own_namespace, *settings.metrics_namespaces))
    ports = [settings.hub_port] if spec.source.from_hub else []
    ports += [settings.traces_port] if settings.traces_endpoint else []
    dns = [{"protocol": p, "port": 53} for p in ("UDP", "TCP")]
    tcp = [{"protocol": "TCP", "port": port} for port in ports]
    egress = [{"ports": dns}, {"ports": tcp}] if tcp else []
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
            "egress": egress,
        },
    }


def _namespaces(names: tuple[str, ...]) -> list[Object]:
    label = "kubernetes.io/metadata.name"
    return [{"namespaceSelector": {"matchLabels": {label: name}}} for name in names]


def controller_revision(spec: ServiceSpec, revision: Revision, settings: Settings) -> Object:
    """The memory of a revision: its inputs, its image and the pod template made from them."""
    owner = Owner.of(spec)
    data = {
        "inputs": spec.inputs,
        "image": revision.image,
        "servedName": spec.served_name,
        **({"imageNamed": True} if revision.named else {}),
        "podTemplate": pod_template(owner.base, spec, revision, settings),
    }
    return _controller_revision(owner, revision.name, revision.number, data, {})


def remembered(spec: ServiceSpec, stored: Object, said: dict[str, str]) -> Object:
    """A stored ControllerRevision with these annotations; all else as it was written."""
    name = stored["metadata"]["labels"][names.LABEL_REVISION]
    return _controller_revision(Owner.of(spec), name, stored["revision"], stored["data"], said)


def _controller_revision(
    owner: Owner, name: str, number: int, data: Object, said: dict[str, str]
) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            **metadata(owner, names.revision_name(owner.base, name), name),
            "annotations": {names.ANNOTATION_IMAGE: data["image"], **said},
        },
        "revision": number,
        "data": data,
    }


def revision_objects(
    spec: ServiceSpec, stored: Object, replicas: int, gate: GateFile
) -> list[Object]:
    """A revision's ConfigMaps and Deployment, from its stored ControllerRevision alone."""
    owner = Owner.of(spec)
    revision = stored["metadata"]["labels"][names.LABEL_REVISION]
    name = names.revision_name(owner.base, revision)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(owner, name, revision),
            "immutable": True,
            "data": {names.LAUNCH_FILE: launch_config(owner, revision, stored["data"]).dumps()},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(owner, names.gate_name(owner.base, revision), revision),
            "data": {names.GATE_FILE: dumps(gate)},
        },
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


def launch_config(owner: Owner, revision: str, data: Object) -> LaunchConfig:
    """What the pod is told, from the revision's stored inputs."""
    inputs = data["inputs"]
    model, engine = inputs["model"], inputs.get("engine", {})
    capacity = inputs.get("capacity", {})
    gpus = inputs["resources"].get("gpus", 0)
    source = parse_source(model["source"])
    return LaunchConfig(
        version=VERSION,
        namespace=owner.namespace,
        service=owner.base,
        revision=revision,
        image=data["image"],
        device=Device.CUDA if gpus else Device.CPU,
        tensor_parallel=max(1, gpus),
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
        ),
        capacity=CapacityOptions(capacity.get("kvTokens"), capacity.get("headroomMiB")),
        require_api_key="access" in inputs,
    )


def event(owner: Owner, said: tuple[str, str, str], version: str, time: str) -> Object:
    """An event about the service: reason, kind and message. Its name comes from those and from the
    version of the resource that they were found at, never from the clock."""
    reason, kind, message = said
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
