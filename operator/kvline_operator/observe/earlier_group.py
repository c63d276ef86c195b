"""Services of the API group that the kind had before.

No operator of this version reconciles them. They are counted, so that nobody takes them for served.
"""

from __future__ import annotations

import logging
from typing import Any

from kvline_contract.names import EARLIER_GROUP, GROUP, PLURAL
from kvline_operator.errors import Forbidden, Missing, OperatorError
from kvline_operator.kube import EARLIER_KIND, Kube

log = logging.getLogger("kvline")
Object = dict[str, Any]


class EarlierGroup:
    """Counts them, and says in the log when there are others than before."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...]) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self.services = 0
        self._unknown = False

    def check(self) -> None:
        try:
            found = count(self._kube, self._namespaces)
        except OperatorError as error:  # this list only informs: all else works without it
            if not self._unknown:
                log.warning("whether %s has services is unknown: %s", EARLIER_GROUP, error)
            self._unknown = True
            return
        self._unknown = False
        if found and found != self.services:
            log.warning("%s", text(found))
        self.services = found


def count(kube: Kube, namespaces: tuple[str, ...]) -> int:
    """0 where the API server does not serve that group."""
    try:
        return sum(1 for _ in kube.metadata(EARLIER_KIND, namespaces))
    except Missing:
        return 0


def released(kube: Kube, items: list[Object]) -> list[Object]:
    """Objects without references to owners of the earlier group that are gone. Where the group's
    definition is gone too, Kubernetes' garbage collector cannot tell, and leaves them for ever."""
    if not any(_references(item) for item in items):
        return items
    (namespace, *_) = {item["metadata"]["namespace"] for item in items}
    try:
        there = {meta["uid"] for meta in kube.metadata(EARLIER_KIND, (namespace,))}
    except Missing:
        there = set()
    except Forbidden:
        return items
    return [_without(item, there) for item in items]


def _without(item: Object, there: set[str]) -> Object:
    gone = [o for o in _references(item) if o["uid"] not in there]
    meta = item["metadata"]
    kept = [o for o in meta.get("ownerReferences") or [] if o not in gone]
    return {**item, "metadata": {**meta, "ownerReferences": kept}}


def _references(item: Object) -> list[Object]:
    found = item["metadata"].get("ownerReferences") or []
    return [o for o in found if str(o.get("apiVersion")).startswith(f"{EARLIER_GROUP}/")]


def text(services: int) -> str:
    return (
        f"{services} of {PLURAL}.{EARLIER_GROUP} exist, which this version does not reconcile: "
        f"move them to {PLURAL}.{GROUP} (docs/operations.md, From the API group {EARLIER_GROUP})"
    )
