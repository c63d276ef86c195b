"""Act: the only place that writes children. Sends an object only when the live one differs.

An object that has a child's name but is not ours is never touched.
"""

from __future__ import annotations

from typing import Any

from kubernetes.utils.quantity import parse_quantity

from kvline_contract.names import FIELD_MANAGER
from kvline_operator.errors import ApiUnavailable, Conflict, Invalid, NameConflict
from kvline_operator.kube import Kube

Object = dict[str, Any]


def ensure(kube: Kube, wanted: Object, seen: Object | None = None, absent: bool = False) -> None:
    """Makes the live object equal to `wanted` in the fields that `wanted` has. One that a list has
    just shown is not read again; one that it has not may have lost its labels, or be foreign. Where
    all says that it is absent, it is made at once, and read only when something has its name."""
    if seen is None and absent:
        try:
            kube.apply(wanted, anew=True)
            return
        except (Conflict, Invalid):
            pass  # a conflict is told by what is there, and what is refused is so again
    meta = wanted["metadata"]
    live = seen or kube.get(wanted["kind"], meta["namespace"], meta["name"])
    if live is not None:
        _check_ours(live, wanted)
        if covers(live, wanted):
            return
    kube.apply(wanted)


def _check_ours(live: Object, wanted: Object) -> None:
    """Raises NameConflict for a foreign object, ApiUnavailable for one that is on its way out."""
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if live["metadata"].get("deletionTimestamp"):
        raise ApiUnavailable(f"{what} is being deleted")
    uid = wanted["metadata"]["ownerReferences"][0]["uid"]
    controllers = [o for o in live["metadata"].get("ownerReferences") or [] if o.get("controller")]
    if any(o.get("uid") == uid for o in controllers):
        return
    applied = any(
        m.get("manager") == FIELD_MANAGER for m in live["metadata"].get("managedFields") or []
    )
    if applied and not controllers:
        return  # ours, somebody took the owner reference away
    if applied and controllers[0].get("name") == wanted["metadata"]["ownerReferences"][0]["name"]:
        raise ApiUnavailable(f"{what} of the deleted namesake is not collected yet")
    raise NameConflict(f"{what} exists and is not this service's; rename one of the two")


def prune(kube: Kube, live: Object, kind: str) -> None:
    """Deletes a child that is no longer wanted."""
    meta = live["metadata"]
    kube.delete(kind, meta["namespace"], meta["name"], meta["uid"])


def covers(live: Any, wanted: Any, key: str = "") -> bool:
    """Whether everything in `wanted` is so in `live`; what only `live` has is others' business."""
    if isinstance(wanted, dict):
        if key in ("apiVersion", "kind"):
            return True
        return isinstance(live, dict) and all(
            name in ("apiVersion", "kind")
            or (_is_empty(value) and _is_empty(live.get(name)))
            or covers(live.get(name), value, name)
            for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return False
        if key == "ownerReferences":  # others may own it too
            return all(any(covers(item, w) for item in live) for w in wanted)
        return len(live) == len(wanted) and all(
            covers(have, want) for have, want in zip(live, wanted, strict=True)
        )
    return bool(live == wanted) or (key in ("cpu", "memory", "sizeLimit") and _same(live, wanted))


def _is_empty(value: Any) -> bool:
    return value is None or value == {} or value == [] or value is False


def _same(live: Any, wanted: Any) -> bool:
    """The API server writes quantities in its own canonical form."""
    try:
        have, want = parse_quantity(live), parse_quantity(wanted)  # type: ignore[no-untyped-call]
        return bool(have == want)
    except (ValueError, TypeError):
        return False
