"""Writes child objects, only where the live one differs.

A foreign object that has the name of a child is never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from kvline_contract.names import FIELD_MANAGER
from kvline_operator.apply import drift
from kvline_operator.apply.drift import Corrections
from kvline_operator.errors import Conflict, Deleting, Invalid, NameConflict
from kvline_operator.kube import Kube

Object = dict[str, Any]
QUANTITIES = ("cpu", "memory", "ephemeral-storage", "sizeLimit")


@dataclass(frozen=True, slots=True)
class Dispute:
    """Another manager changes a child object of ours."""

    text: str
    settled: bool  # corrected too often: the change is tolerated for now
    version: str  # resourceVersion of the object


def ensure(
    kube: Kube,
    wanted: Object,
    seen: Object | None = None,
    absent: bool = False,
    exact: bool = False,
    corrections: Corrections | None = None,
) -> Dispute | None:
    """Makes the live object equal to `wanted` in the fields that `wanted` has.

    `seen` is the object from a list, which is not read again. One that the lists lack may have lost
    its labels or be foreign, so it is read by name; with `absent` it is created first, and read
    only if something has its name. With `exact` it is written only over the version that was read.
    Returns the dispute where another manager has added something; that is removed a few times."""
    meta = wanted["metadata"]
    refused: Conflict | Invalid | None = None
    if seen is None and absent:
        try:
            kube.apply(wanted, anew=True)
            return None
        except (Conflict, Invalid) as error:
            refused = error  # or the difference to what has its name is the reason
    live = seen or kube.get(wanted["kind"], meta["namespace"], meta["name"])
    if live is None and refused is not None:
        raise refused
    if live is None:
        kube.apply(wanted)
        return None
    _check_ours(live, wanted)
    return _correct(kube, live, wanted, exact, corrections or Corrections())


def _correct(
    kube: Kube, live: Object, wanted: Object, exact: bool, corrections: Corrections
) -> Dispute | None:
    extra = drift.foreign(live, wanted)
    found = tuple(item for item in extra if not item.admitted)
    path = difference(drift.without(live, extra), wanted)
    if not found and path is None:
        return None
    meta = live["metadata"]
    settled = corrections.exhausted(meta["uid"], wanted)
    if not settled:
        _write(kube, live, wanted, exact, found, path)
        corrections.add(meta["uid"], wanted)
    if not found and not settled:
        return None  # a field of ours, restored
    return Dispute(_describe(live, wanted, found, path), settled, meta["resourceVersion"])


def _write(
    kube: Kube,
    live: Object,
    wanted: Object,
    exact: bool,
    found: tuple[drift.Foreign, ...],
    path: str | None,
) -> None:
    if found:
        meta = live["metadata"]
        kube.json_patch(wanted["kind"], meta["namespace"], meta["name"], drift.removal(live, found))
    if path is None:
        return
    if live.get("immutable") and live.get("data") != wanted.get("data"):
        prune(kube, live, wanted["kind"])  # immutable: it can only be created again
        kube.apply(wanted)
        return
    kube.apply(wanted, over=live, exact=exact)


def _describe(
    live: Object, wanted: Object, found: tuple[drift.Foreign, ...], path: str | None
) -> str:
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if found:
        return f"{what}: " + ", ".join(f"{f.path} (set by {f.manager})" for f in found[:5])
    others = {m.get("manager", "") for m in live["metadata"].get("managedFields") or []}
    named = ", ".join(sorted(others - {FIELD_MANAGER, ""})) or "a mutating admission webhook"
    return f"{what}: {path} (which may be set by {named})"


def _check_ours(live: Object, wanted: Object) -> None:
    """Raises NameConflict for a foreign object, Deleting for one that is being deleted."""
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if live["metadata"].get("deletionTimestamp"):
        raise Deleting(f"{what} is being deleted")
    uid = wanted["metadata"]["ownerReferences"][0]["uid"]
    controllers = [o for o in live["metadata"].get("ownerReferences") or [] if o.get("controller")]
    if any(o.get("uid") == uid for o in controllers):
        return
    applied = any(
        m.get("manager") == FIELD_MANAGER for m in live["metadata"].get("managedFields") or []
    )
    if applied and not controllers:
        return  # ours, its owner reference was removed
    if applied and controllers[0].get("name") == wanted["metadata"]["ownerReferences"][0]["name"]:
        raise Deleting(f"{what} of a deleted service of this name is not collected yet")
    raise NameConflict(f"{what} exists and is not this service's; rename one of the two")


def prune(kube: Kube, live: Object, kind: str) -> None:
    """Deletes a child that is no longer wanted."""
    meta = live["metadata"]
    kube.delete(kind, meta["namespace"], meta["name"], meta["uid"])


def covers(live: Any, wanted: Any) -> bool:
    """Whether `live` has every field of `wanted`; it may have more."""
    return difference(live, wanted) is None


def difference(live: Any, wanted: Any, key: str = "", path: str = "") -> str | None:
    """The path of the first field of `wanted` that `live` has not; None where it has all."""
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return path
        for name, value in wanted.items():
            have = live.get(name)
            if name in ("apiVersion", "kind") or (_is_empty(value) and _is_empty(have)):
                continue
            found = difference(have, value, name, f"{path}.{name}" if path else name)
            if found is not None:
                return found
        return None
    if isinstance(wanted, list):
        return _list_difference(live, wanted, key, path)
    same = bool(live == wanted) or (key in QUANTITIES and _same(live, wanted))
    return None if same else path


def _list_difference(live: Any, wanted: list[Any], key: str, path: str) -> str | None:
    if not isinstance(live, list):
        return path
    if key == "ownerReferences":  # others may be added
        return None if all(any(covers(item, w) for item in live) for w in wanted) else path
    if len(live) != len(wanted):
        return path
    for index, (have, want) in enumerate(zip(live, wanted, strict=True)):
        found = difference(have, want, key, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _is_empty(value: Any) -> bool:
    return value is None or value == {} or value == [] or value is False


def _same(live: Any, wanted: Any) -> bool:
    """Compares quantities, which the API server stores in a canonical form."""
    try:
        have, want = parse_quantity(live), parse_quantity(wanted)  # type: ignore[no-untyped-call]
        return bool(have == want)
    except (ValueError, TypeError):
        return False
