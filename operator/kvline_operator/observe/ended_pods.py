"""Terminal pods, of phase Failed or Succeeded. The containers of a Deployment always restart,
so such a pod was ended by Kubernetes or its node: evicted, not admitted, preempted, lost. It is no
replica any more and does not count against its revision. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_contract.names import revision_of

Object = dict[str, Any]
HISTORY_LIMIT = 10  # for each service; older ones are deleted, as a broken node makes thousands
TERMINAL = ("Failed", "Succeeded")
# Kubernetes keeps why it ended a pod only if a container of it failed (kubernetes issue 141483). A
# server that ends in time after SIGTERM exits with 0.
NO_REASON = "evicted, or its node shut down: its pod's events say which"
REFUSED = "UnexpectedAdmissionError"  # of the kubelet, where a device cannot be allocated


@dataclass(frozen=True, slots=True)
class EndedPod:
    name: str
    uid: str
    revision: str
    node: str
    created: str  # RFC 3339
    reason: str  # set by Kubernetes, such as Evicted
    message: str

    @property
    def text(self) -> str:
        why = f"{self.reason}: {self.message}" if self.message else self.reason
        return f"{self.name} on {self.node or 'no node'}: {why}"


def has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in TERMINAL


def ended(pods: list[Object]) -> tuple[EndedPod, ...]:
    """The terminal ones, newest first."""
    found = [_view(pod) for pod in pods if has_ended(pod)]
    return tuple(sorted(found, key=lambda p: (p.created, p.name), reverse=True))


def _view(pod: Object) -> EndedPod:
    meta, status = pod["metadata"], pod["status"]
    disrupted = [
        c for c in status.get("conditions") or [] if c.get("type") == "DisruptionTarget"
    ] or [{}]
    reason = status.get("reason") or disrupted[0].get("reason") or ""
    message = status.get("message") or disrupted[0].get("message") or ""
    if not reason and status["phase"] == "Succeeded":
        message = NO_REASON
    return EndedPod(
        name=meta["name"],
        uid=meta["uid"],
        revision=revision_of(pod),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        created=meta.get("creationTimestamp", ""),
        reason=reason or status["phase"],
        message=message[:256],
    )
