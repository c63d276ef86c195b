"""What of a spec makes a revision.

Operators before had other names for some fields. Their ControllerRevisions are immutable, so what
is stored in one is read as if it were written today.
"""

from __future__ import annotations

from typing import Any

from kvline_operator.api.modalities import ordered
from kvline_operator.api.quantity import canonical

Object = dict[str, Any]
QUANTITIES = ("cpu", "cpuLimit", "memory", "ephemeralStorage", "sharedMemory")
# Parent -> name of before -> today's.
RENAMED = {
    ("model",): {"tokenSecret": "tokenSecretRef"},
    ("model", "cache"): {"claim": "claimName"},
    ("access",): {"tlsSecret": "tlsSecretRef", "apiKeySecret": "apiKeySecretRef"},
}


def read(stored: Object) -> Object:
    """Inputs in today's names, with quantities and modalities in canonical form; a copy."""
    out = dict(stored)
    for path, names in RENAMED.items():
        _rename(out, path, names)
    if "resources" in out:
        out["resources"] = {
            key: canonical(value, f"spec.resources.{key}") if key in QUANTITIES else value
            for key, value in out["resources"].items()
        }
    if "modalities" in out.get("engine", {}):
        engine = out["engine"]
        out["engine"] = {**engine, "modalities": ordered(engine["modalities"])}
    return out


def _rename(parent: Object, path: tuple[str, ...], names: dict[str, str]) -> None:
    """Renames the fields of `names` below `path`, in copies."""
    if not path:
        for old in names.keys() & parent.keys():
            parent[names[old]] = parent.pop(old)
    elif path[0] in parent:
        parent[path[0]] = dict(parent[path[0]])
        _rename(parent[path[0]], path[1:], names)
