"""Which service an object belongs to, by its metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvline_contract.names import KIND, LABEL_PREPARES, LABEL_SERVICE, base_name
from kvline_operator.api.key import Key

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


class Owners:
    """Pods and Jobs have only their service's base name as a label; this maps it to the name."""

    def __init__(self) -> None:
        self._by_base: dict[tuple[str, str], str] = {}

    def add(self, key: Key) -> None:
        self._by_base[key.namespace, base_name(key.name)] = key.name

    def forget(self, key: Key) -> None:
        self._by_base.pop((key.namespace, base_name(key.name)), None)

    def of(self, metadata: Mapping[str, Any]) -> Key | None:
        """The service of a child object; None for a foreign object."""
        for reference in metadata.get("ownerReferences") or []:
            if reference.get("kind") == KIND:
                return Key(metadata["namespace"], str(reference["name"]))
        labels = metadata.get("labels") or {}
        base = labels.get(LABEL_SERVICE) or labels.get(LABEL_PREPARES, "")
        name = self._by_base.get((metadata["namespace"], base))
        return Key(metadata["namespace"], name) if name else None
