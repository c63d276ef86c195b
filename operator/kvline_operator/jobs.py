"""Plan: the Job that fetches what a revision's pods need before one of them is made. Pure.

With a cache claim it downloads the model, once a revision and not once a pod, and is the only one
that sees the token. Else it starts the server's image for a moment, where pods that serve are to
make room: so an image that cannot be pulled takes nothing away. One Job runs on one node; it proves
that the image can be pulled, not that every node has it.
"""

from __future__ import annotations

from typing import Any

from kvline_contract import names
from kvline_operator.podspec import pull_container
from kvline_operator.render import Owner, egress, metadata
from kvline_operator.settings import Settings
from kvline_operator.spec import ServiceSpec

Object = dict[str, Any]
RETRIES = 6  # in one Job, 10 s after the first failure, then twice as long each time
KEPT_SECONDS = 300  # one that has ended: what it said, and the pause before the next
SHARED = (  # with the pods of the revision; a GPU, and so its runtime class, is not needed
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "nodeSelector",
    "tolerations",
    "priorityClassName",
    "imagePullSecrets",
)


def downloads(stored: Object) -> bool:
    """Whether a revision's model comes by a Job; an earlier operator's pods fetch it themselves."""
    return "download" in stored["data"]


def job(spec: ServiceSpec, stored: Object, nodes: tuple[str, ...] = ()) -> Object:
    """Of a stored revision; `nodes` are those where it will take the place of others."""
    owner, data = Owner.of(spec), stored["data"]
    revision = stored["metadata"]["labels"][names.LABEL_REVISION]
    of_server = data["podTemplate"]
    container = data.get("download") or pull_container(data["image"])
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    pod: Object = {key: of_server["spec"][key] for key in SHARED if key in of_server["spec"]}
    pod |= {
        "restartPolicy": "Never",  # a pod that failed stays, with its reason
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
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": _worn(of_server["metadata"], owner.base), "spec": pod},
        },
    }


def policy(spec: ServiceSpec, settings: Settings) -> Object:
    """Nothing in; out, the hub's port where there is something to fetch."""
    owner = Owner.of(spec)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(owner, names.prepare_policy(owner.base)),
        "spec": {
            "podSelector": {"matchLabels": {names.LABEL_PREPARES: owner.base}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": egress([settings.hub_port] if spec.source.from_hub else []),
        },
    }


def _worn(of_server: Object, base: str) -> Object:
    """What the pods wear, without what makes one a replica of the service."""
    labels = {k: v for k, v in of_server["labels"].items() if k != names.LABEL_SERVICE}
    return {**of_server, "labels": {**labels, names.LABEL_PREPARES: base}}


def _gpu_resource(of_server: Object) -> str:
    """The extended resource that the server's container asks for; empty on the CPU."""
    limits = of_server["containers"][0].get("resources", {}).get("limits", {})
    return next((name for name in limits if "/" in name), "")


def _affinity(given: Object, nodes: tuple[str, ...]) -> Object:
    """To nodes alone: a Job stands beside no replica. Preferred, as a node may be cordoned."""
    out = dict(given.get("nodeAffinity", {}))
    if nodes:
        key = "preferredDuringSchedulingIgnoredDuringExecution"
        fields = [{"key": "metadata.name", "operator": "In", "values": [node]} for node in nodes]
        there = [{"weight": 100, "preference": {"matchFields": [field]}} for field in fields]
        out[key] = [*out.get(key, []), *there]
    return {"nodeAffinity": out} if out else {}
