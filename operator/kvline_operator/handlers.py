"""kopf wiring only: every event becomes queue.add(key). No handler writes anything.

Raw event handlers leave no annotation and no finalizer behind, so deletion works while the
operator is down.
"""

from __future__ import annotations

from typing import Any

import kopf

from kvline_contract.names import (
    API_VERSION,
    GROUP,
    KIND,
    LABEL_MANAGED_BY,
    LABEL_SERVICE,
    MANAGED_BY,
    PLURAL,
    base_name,
)
from kvline_operator.workqueue import Key, WorkQueue

CHILD_KINDS = (
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "configmaps"),
    ("apps", "v1", "deployments"),
    ("apps", "v1", "controllerrevisions"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
)


def register(registry: kopf.OperatorRegistry, queue: WorkQueue) -> None:
    """Hangs the handlers on a registry of ours, so that nothing happens at import."""
    services = ServiceNames()

    @kopf.on.login(registry=registry)
    async def login(**given: Any) -> kopf.ConnectionInfo | None:
        """The pod's own token, else the kubeconfig: the same order as the client's."""
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    @kopf.on.event(GROUP, API_VERSION, PLURAL, registry=registry)
    async def service(namespace: str | None, name: str, type: str | None, **_: Any) -> None:
        if namespace is not None:
            (services.forget if type == "DELETED" else services.add)(namespace, name)
            queue.add(Key(namespace, name))

    for group, version, plural in CHILD_KINDS:

        @kopf.on.event(group, version, plural, registry=registry)
        async def child(namespace: str | None, body: Any, **_: Any) -> None:
            name = services.owner(namespace, body) if namespace is not None else None
            if namespace is not None and name is not None:
                queue.add(Key(namespace, name))


class ServiceNames:
    """Which service a child belongs to. Pods and their kin carry only the base name."""

    def __init__(self) -> None:
        self._by_base: dict[tuple[str, str], str] = {}

    def add(self, namespace: str, name: str) -> None:
        self._by_base[namespace, base_name(name)] = name

    def forget(self, namespace: str, name: str) -> None:
        self._by_base.pop((namespace, base_name(name)), None)

    def owner(self, namespace: str, body: Any) -> str | None:
        metadata = body["metadata"]
        for reference in metadata.get("ownerReferences") or []:
            if reference.get("kind") == KIND:
                return str(reference["name"])
        base = (metadata.get("labels") or {}).get(LABEL_SERVICE, "")
        return self._by_base.get((namespace, base))


def configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True
    for group, version, plural in CHILD_KINDS:
        settings.watching.label_selectors[group, version, plural] = (
            f"{LABEL_MANAGED_BY}={MANAGED_BY}"
        )
