"""Which pods belong to a service. Anybody may set our labels on a pod; the UIDs of owner
references are trusted instead.

A pod's controller is a ReplicaSet, whose controller is a Deployment. Deployments are listed anyway;
each ReplicaSet is read by name once and cached, which needs no list or watch permission. A name is
not enough: a foreign ReplicaSet may have the name of one of ours.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from kvline_operator.kube import Kube

Object = dict[str, Any]
MAX_ENTRIES = 8192  # ReplicaSets; the least recently used one is evicted and read again


class PodOwnership:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._service: OrderedDict[str, str] = OrderedDict()  # ReplicaSet UID -> service UID

    def ours(self, pods: list[Object], service: str, deployments: Collection[str]) -> list[Object]:
        """Pods of these Deployments (given by UID) of the service. A cached ReplicaSet stays with
        its service: a Deployment may be deleted before its pods are."""
        known: dict[str, bool] = {}
        out = []
        for pod in pods:
            owner = controller(pod, "ReplicaSet")
            uid = owner.get("uid", "")
            if uid not in known:
                known[uid] = self._is_ours(pod, owner, service, deployments)
            if known[uid]:
                out.append(pod)
        return out

    def _is_ours(
        self, pod: Object, owner: Object, service: str, deployments: Collection[str]
    ) -> bool:
        uid = owner.get("uid", "")
        if not uid:
            return False
        with self._lock:
            if self._service.get(uid) == service:
                self._service.move_to_end(uid)
                return True
        found = self._kube.get("ReplicaSet", pod["metadata"]["namespace"], owner["name"])
        if found is None or found["metadata"]["uid"] != uid:
            return False
        if controller(found, "Deployment").get("uid") not in deployments:
            return False
        with self._lock:
            self._service[uid] = service
            if len(self._service) > MAX_ENTRIES:
                self._service.popitem(last=False)
        return True


def controller(item: Object, kind: str) -> Object:
    """An object's controller reference to this kind of group apps; empty where it has none."""
    for reference in item["metadata"].get("ownerReferences") or []:
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        if reference.get("controller") and (group, reference.get("kind")) == ("apps", kind):
            return dict(reference)
    return {}
