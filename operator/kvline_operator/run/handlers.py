"""kopf handlers: every watch event queues its service. No handler writes anything.

Raw event handlers need no annotations and no finalizers, so deletion works while the operator is
down.
"""

from __future__ import annotations

from typing import Any

import kopf

from kvline_contract.names import API_VERSION, GROUP, LABEL_MANAGED_BY, MANAGED_BY, PLURAL
from kvline_operator.api.key import Key
from kvline_operator.kube import KINDS, PAGE
from kvline_operator.observe.ownership import CHILDREN, Owners
from kvline_operator.run.resync import Resync
from kvline_operator.run.workqueue import WorkQueue


def _resource(kind: str) -> tuple[str, str, str]:
    """Group, version and plural."""
    path, plural = KINDS[kind]
    group, _, version = path.removeprefix("/apis/").removeprefix("/api/").rpartition("/")
    return group, version, plural


def register(
    registry: kopf.OperatorRegistry, queue: WorkQueue, owners: Owners, resync: Resync
) -> None:
    """Registers the handlers; in a registry of our own, so that nothing happens at import."""

    @kopf.on.login(registry=registry)
    async def login(**given: Any) -> kopf.ConnectionInfo | None:
        """The service account token, else the kubeconfig, as kube.connect does."""
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def service(body: Any, type: str | None, **_: Any) -> None:
        metadata, gone = body["metadata"], type == "DELETED"
        key = Key(metadata["namespace"], metadata["name"])
        (owners.forget if gone else owners.add)(key)
        resync.observe_event(key, metadata, gone)
        queue.add(key)

    for kind in CHILDREN:

        @kopf.on.event(*_resource(kind), registry=registry)
        async def child(body: Any, type: str | None, **_: Any) -> None:
            owner = owners.of(body["metadata"])
            resync.observe_event(owner, body["metadata"], type == "DELETED")
            if owner is not None:
                queue.add(owner)


class NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """Switches off kopf's diffs against the last handled state, which our handlers do not use: kopf
    computes them for each event, with copies of the whole object."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None


def configure(settings: kopf.OperatorSettings) -> None:
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = PAGE
    for kind in CHILDREN:
        settings.watching.label_selectors[_resource(kind)] = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
