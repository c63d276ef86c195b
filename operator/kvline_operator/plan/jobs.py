"""The prepare Job of a revision, which runs before its first pod. Pure.

With spec.model.cache it downloads the model, once for each revision instead of once for each pod,
and only its pod gets the token. Otherwise it runs where serving pods are to be replaced (strategies
Replace and Recreate), and checks the model in its claim or on the hub: an image that cannot be
pulled, or a model that is not there, removes no replica. It runs on one node and shows that the
image can be pulled, not that every node has it.
"""

from __future__ import annotations

from typing import Any

from kvline_contract import names
from kvline_operator.api.source import Download
from kvline_operator.api.spec import ServiceSpec
from kvline_operator.observe.live_template import SHARED
from kvline_operator.plan.podspec import check_container, hub_ports
from kvline_operator.plan.render import Owner, egress, metadata
from kvline_operator.settings import Settings

Object = dict[str, Any]
# With the revision's pods; no runtime class, because it needs no GPU.
KEPT = (*SHARED, "tolerations")
RETRIES = 6  # backoffLimit; Kubernetes waits 10 s, then twice as long each time
TTL_SECONDS = 300  # of a finished Job; after a failure also the pause before the next one


def downloads(stored: Object) -> bool:
    """Whether a Job downloads the revision's model; pods of earlier operators do it themselves."""
    return "download" in stored["data"]


def job(spec: ServiceSpec, stored: Object, nodes: tuple[str, ...] = ()) -> Object:
    """The Job of a stored revision; `nodes` are those of the replicas that it will replace."""
    owner, data = Owner.of(spec), stored["data"]
    revision = stored["metadata"]["labels"][names.LABEL_REVISION]
    of_server = data["podTemplate"]
    container = data.get("download") or check_container(data)
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    pod: Object = {key: of_server["spec"][key] for key in KEPT if key in of_server["spec"]}
    pod |= {
        "restartPolicy": "Never",  # a failed pod is kept, with its reason
        "containers": [container],
        "volumes": [v for v in of_server["spec"]["volumes"] if v["name"] in mounted],
    }
    if gpu := _gpu_resource(of_server["spec"]):
        # A pod that asks for no GPU gets no toleration of the taint that keeps GPU nodes free
        # (the admission plug-in ExtendedResourceToleration).
        pod["tolerations"] = [*pod.get("tolerations", []), {"key": gpu, "operator": "Exists"}]
    affinity = _affinity(of_server["spec"].get("affinity", {}), nodes)
    if affinity:
        pod["affinity"] = affinity
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(owner, names.prepare_name(owner.base, revision), revision),
        "spec": {
            "backoffLimit": RETRIES,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": {"metadata": _pod_metadata(of_server["metadata"], owner.base), "spec": pod},
        },
    }


def policy(spec: ServiceSpec, made: Object, settings: Settings) -> Object:
    """Of the Job `made`. No ingress; egress to the hub's port where the model is there."""
    owner = Owner.of(spec)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    ports = [] if spec.source.download is Download.NOBODY else sorted(hub_ports(container))
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, names.prepare_policy(owner.base)),
        "spec": {
            "podSelector": {"matchLabels": {names.LABEL_PREPARES: owner.base}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": egress(ports, settings.mesh_namespaces),
        },
    }


def _pod_metadata(of_server: Object, base: str) -> Object:
    """Labels and annotations of the revision's pods, without the label that selects replicas."""
    labels = {k: v for k, v in of_server["labels"].items() if k != names.LABEL_SERVICE}
    return {**of_server, "labels": {**labels, names.LABEL_PREPARES: base}}


def _gpu_resource(of_server: Object) -> str:
    """The extended resource that the server's container asks for; empty on the CPU."""
    limits = of_server["containers"][0].get("resources", {}).get("limits", {})
    return next((name for name in limits if "/" in name), "")


def _affinity(given: Object, nodes: tuple[str, ...]) -> Object:
    """Node affinity only, plus a preference for `nodes`; not required, as they may be cordoned."""
    out = dict(given.get("nodeAffinity", {}))
    if nodes:
        key = "preferredDuringSchedulingIgnoredDuringExecution"
        fields = [{"key": "metadata.name", "operator": "In", "values": [node]} for node in nodes]
        there = [{"weight": 100, "preference": {"matchFields": [field]}} for field in fields]
        out[key] = [*out.get(key, []), *there]
    return {"nodeAffinity": out} if out else {}
