"""Read: whose a pod is. A label is anybody's to set; a uid of an owner is not.

A pod names its ReplicaSet, and that one its Deployment, which is listed anyway. So each ReplicaSet
is read once in its life, by name: no list or watch of them, and no right to one. A name proves
nothing: somebody's own ReplicaSet may be called like one of ours.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from kvline_operator.kube import Kube

Object = dict[str, Any]
MAX_KEPT = 8192  # ReplicaSets; the longest unasked goes first, and is read again


class PodOwnership:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._lock = threading.Lock()
        self._service: OrderedDict[str, str] = OrderedDict()  # uid of a ReplicaSet -> of a service

    def ours(self, pods: list[Object], service: str, deployments: Collection[str]) -> list[Object]:
        """Those of a service's own Deployments, given by uid. What was once of the service stays
        so: its Deployment may go before its pods do."""
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
            if len(self._service) > MAX_KEPT:
                self._service.popitem(last=False)
        return True


def controller(item: Object, kind: str) -> Object:
    """The reference to an object's controller of this kind of apps; empty where it has none."""
    for reference in item["metadata"].get("ownerReferences") or []:
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        if reference.get("controller") and (group, reference.get("kind")) == ("apps", kind):
            return dict(reference)
    return {}
