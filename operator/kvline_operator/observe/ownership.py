"""The one answer to whose object this is.

Anybody may set our labels and names; of an object with a controller its UID is trusted. One that we
have written and that has no controller is an orphan, such as `kubectl delete --cascade=orphan`
leaves. The service of that name gets it back where its content is what we would have written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvline_contract import names
from kvline_contract.names import FIELD_MANAGER, KIND, LABEL_SERVICE, revision_of
from kvline_operator.api.key import Key
from kvline_operator.api.revision_hash import is_hash
from kvline_operator.kube import Kube
from kvline_operator.observe.live_template import is_deployment_of, is_job_of
from kvline_operator.observe.restricted import is_data

Object = dict[str, Any]
# The kinds that are watched. No ResourceClaimTemplate: API servers before 1.34 lack the kind, and
# one that was deleted is created again with the events of the first pod that needs it.
CHILDREN = (
    "Pod",
    "Service",
    "ServiceAccount",
    "ConfigMap",
    "Deployment",
    "ControllerRevision",
    "PodDisruptionBudget",
    "NetworkPolicy",
)
MAX_ENTRIES = 8192  # ReplicaSets; the least recently used one is evicted and read again


class Whose(Enum):
    OURS = auto()
    ORPHAN = auto()  # written by us, and nobody's now
    EARLIER = auto()  # of a deleted service of this name, not collected yet
    FOREIGN = auto()


def whose(item: Object, owner: Mapping[str, Any]) -> Whose:
    """`owner`: a reference to the service, of which name and UID count."""
    controllers = [o for o in item["metadata"].get("ownerReferences") or [] if o.get("controller")]
    if any(o.get("uid") == owner["uid"] for o in controllers):
        return Whose.OURS
    fields = item["metadata"].get("managedFields") or []
    if not any(m.get("manager") == FIELD_MANAGER for m in fields):
        return Whose.FOREIGN
    if not controllers:
        return Whose.ORPHAN
    return Whose.EARLIER if controllers[0].get("name") == owner["name"] else Whose.FOREIGN


def is_owned(item: Object, uid: str) -> bool:
    return any(o.get("uid") == uid for o in item["metadata"].get("ownerReferences") or [])


@dataclass(frozen=True, slots=True)
class Service:
    """Whose children are asked for."""

    name: str
    uid: str
    base: str

    def revisions(self, items: Sequence[Object]) -> list[Object]:
        """Its ControllerRevisions, and orphans that are a revision of its name."""
        return [r for r in living(items) if self._owns(r) or (self._left(r) and self._made(r))]

    def of_revisions(self, items: Sequence[Object], revisions: Sequence[Object]) -> list[Object]:
        """Its other children, and orphans of these revisions, of which Deployments and Jobs have
        to be as the revision stores them. Without an orphan among the revisions there is none of
        the service as a whole."""
        known = {revision_of(r): r["data"] for r in revisions}
        left = any(not self._owns(r) for r in revisions)
        return [i for i in items if self._owns(i) or (self._left(i) and self._fits(i, known, left))]

    def _owns(self, item: Object) -> bool:
        return is_owned(item, self.uid)

    def _left(self, item: Object) -> bool:
        return whose(item, {"name": self.name, "uid": self.uid}) is Whose.ORPHAN

    def _made(self, revision: Object) -> bool:
        data, name = revision.get("data") or {}, revision_of(revision)
        inputs, image = data.get("inputs") or {}, str(data.get("image"))
        if revision["metadata"]["name"] != names.revision_name(self.base, name):
            return False
        return is_hash(name, inputs, image) and is_data(data, self.base, name)

    def _fits(self, item: Object, known: Mapping[str, Object], left: bool) -> bool:
        name, revision = item["metadata"]["name"], revision_of(item)
        if not revision:
            return left and name in (names.records_name(self.base), names.scale_name(self.base))
        kinds = names.revision_name, names.gate_name, names.prepare_name
        if revision not in known or name not in [named(self.base, revision) for named in kinds]:
            return False
        template, data = (item.get("spec") or {}).get("template"), known[revision]
        if template is None:
            return True
        if name == names.prepare_name(self.base, revision):
            return is_job_of(template, data)
        return is_deployment_of(template, data)


def living(items: Sequence[Object]) -> list[Object]:
    return [item for item in items if not item["metadata"].get("deletionTimestamp")]


class Owners:
    """Pods and Jobs have only their service's base name as a label; this maps it to the name."""

    def __init__(self) -> None:
        self._by_base: dict[tuple[str, str], str] = {}

    def add(self, key: Key) -> None:
        self._by_base[key.namespace, names.base_name(key.name)] = key.name

    def forget(self, key: Key) -> None:
        self._by_base.pop((key.namespace, names.base_name(key.name)), None)

    def of(self, metadata: Mapping[str, Any]) -> Key | None:
        """The service of a child object; None for a foreign object."""
        for reference in metadata.get("ownerReferences") or []:
            if reference.get("kind") == KIND:
                return Key(metadata["namespace"], str(reference["name"]))
        labels = metadata.get("labels") or {}
        base = labels.get(LABEL_SERVICE) or labels.get(names.LABEL_PREPARES, "")
        name = self._by_base.get((metadata["namespace"], base))
        return Key(metadata["namespace"], name) if name else None


class PodOwnership:
    """A pod's controller is a ReplicaSet, whose controller is a Deployment. Deployments are listed
    anyway; each ReplicaSet is read by name once and cached, which needs no right to list or watch.
    A name is not enough: a foreign ReplicaSet may have the name of one of ours."""

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
