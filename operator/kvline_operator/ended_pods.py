"""Read: pods that ended for good. A Deployment's containers are started again for ever, so it is
always Kubernetes or the node that ends such a pod: evicted, refused at admission, preempted, lost.
It is no replica any more, and says nothing of its revision. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_contract.names import LABEL_REVISION

Object = dict[str, Any]
KEPT = 10  # a service; older ones are deleted, as a broken node makes thousands
TERMINAL = ("Failed", "Succeeded")
REFUSED = "UnexpectedAdmissionError"  # of the kubelet, when a device cannot be given


@dataclass(frozen=True, slots=True)
class EndedPod:
    name: str
    uid: str
    revision: str
    node: str
    created: str  # RFC 3339
    reason: str  # Kubernetes' own, such as Evicted
    message: str

    @property
    def text(self) -> str:
        return f"{self.name} on {self.node or 'no node'}: {self.reason}: {self.message}"


def has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in TERMINAL


def ended(pods: list[Object]) -> tuple[EndedPod, ...]:
    """Newest first."""
    found = [_view(pod) for pod in pods if has_ended(pod)]
    return tuple(sorted(found, key=lambda p: (p.created, p.name), reverse=True))


def surplus(pods: tuple[EndedPod, ...]) -> tuple[EndedPod, ...]:
    """Those to delete, of all that a service has."""
    return pods[KEPT:]


def _view(pod: Object) -> EndedPod:
    meta, status = pod["metadata"], pod["status"]
    disrupted = [
        c for c in status.get("conditions") or [] if c.get("type") == "DisruptionTarget"
    ] or [{}]
    return EndedPod(
        name=meta["name"],
        uid=meta["uid"],
        revision=(meta.get("labels") or {}).get(LABEL_REVISION, ""),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        created=meta.get("creationTimestamp", ""),
        reason=status.get("reason") or disrupted[0].get("reason") or status["phase"],
        message=(status.get("message") or disrupted[0].get("message") or "")[:256],
    )
