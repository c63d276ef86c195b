"""spec.replicas as it was read: its value, and who wrote it last by the object's managedFields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicasField:
    value: int = 1
    managers: tuple[str, ...] = ()  # several that applied the same value; none for the default
    version: str = ""  # resourceVersion of the object


def read(body: dict[str, Any]) -> ReplicasField:
    metadata = body["metadata"]
    managers = {
        str(entry.get("manager", ""))
        for entry in metadata.get("managedFields") or []
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    }
    value = (body.get("spec") or {}).get("replicas", 1)
    return ReplicasField(value, tuple(sorted(managers)), metadata.get("resourceVersion", ""))
