"""Who sets back what a verb of the plug-in has written, by the object's managedFields. Pure.

A field that a manager applies, such as one that Git has, is its own again at its next apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvline_operator.api.quantity import comparable

Object = dict[str, Any]
# Apply without server-side apply: they compare with the object, and their writes are Updates.
# Helm 3 compares with its own last manifest alone, and leaves what that has not changed.
CLIENT_SIDE = ("kubectl-client-side-apply", "argocd-controller")


def warnings(before: Object, spec: Object) -> list[str]:
    """A line for each manager that applies fields of the object `before` in which `spec`, the one
    that was written, differs."""
    found: dict[str, set[str]] = {}
    for entry in before["metadata"].get("managedFields") or []:
        manager = str(entry.get("manager") or "unknown")
        if entry.get("operation") != "Apply" and manager not in CLIENT_SIDE:
            continue
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        found.setdefault(manager, set()).update(_changed(fields, before["spec"], spec, "spec"))
    return [_text(manager, sorted(paths)) for manager, paths in sorted(found.items()) if paths]


def _changed(fields: Object, before: Any, after: Any, path: str) -> Iterator[str]:
    """Fields of `fields`, of fieldsV1, that differ. No map of the spec is atomic, so an applied one
    is its fields. A list counts as one."""
    if not isinstance(before, dict):
        if comparable(before) != comparable(after):
            yield path
        return
    after = after if isinstance(after, dict) else {}
    for key, below in fields.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            yield from _changed(below, before.get(name), after.get(name), f"{path}.{name}")


def _text(manager: str, paths: list[str]) -> str:
    it = "it" if len(paths) == 1 else "them"
    return (
        f"{manager} applies {' and '.join(paths)}, and sets {it} back at its next apply: change "
        f"{it} where {manager} takes {it} from"
    )
