"""Writes child objects, only where the live one differs.

A foreign object that has the name of a child is never changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from kvline_operator.apply import drift
from kvline_operator.apply.difference import Difference, covers, differences, value_at
from kvline_operator.apply.drift import Corrections, Foreign
from kvline_operator.errors import Conflict, Deleting, Invalid, NameConflict
from kvline_operator.kube import Kube
from kvline_operator.observe.earlier_group import released
from kvline_operator.observe.ownership import Whose, whose

Object = dict[str, Any]


class End(Enum):
    REMOVED = auto()
    TOLERATED = auto()  # corrected too often: it stays for now
    ADMITTED = auto()  # made by the API server's admission: it stays


@dataclass(frozen=True, slots=True)
class Dispute:
    """Somebody else changes a child object of ours."""

    text: str
    end: End
    version: str  # resourceVersion of the object


def ensure(
    kube: Kube,
    wanted: Object,
    seen: Object | None = None,
    absent: bool = False,
    exact: bool = False,
    corrections: Corrections | None = None,
) -> tuple[Dispute, ...]:
    """Makes the live object equal to `wanted` in the fields that `wanted` has.

    `seen` is the object from a list, which is not read again. One that the lists lack may have lost
    its labels or be foreign, so it is read by name; with `absent` it is created first, and read
    only if something has its name. With `exact` it is written only over the version that was read.
    Returns a dispute where another manager has set something, which is set back a few times, or
    admission has changed what was written."""
    known = corrections or Corrections()
    refused: Conflict | Invalid | None = None
    if seen is None and absent:
        try:
            return _admitted(kube.apply(wanted, anew=True), wanted, known)
        except (Conflict, Invalid) as error:
            refused = error  # or the difference to what has its name is the reason
    live = seen or _by_name(kube, wanted)
    if live is None and refused is not None:
        raise refused
    if live is None:
        return _admitted(kube.apply(wanted), wanted, known)
    _check_living(live, wanted)
    unlisted = seen is None and "template" in wanted.get("spec", {})  # the lists' are as rendered
    if unlisted and whose(live, wanted["metadata"]["ownerReferences"][0]) is Whose.ORPHAN:
        raise _conflict(wanted)
    return _correct(kube, live, _kept(live, wanted), exact, known)


def create_revision(kube: Kube, wanted: Object) -> None:
    """Creates a ControllerRevision. One that exists though the list lacks it has lost its labels:
    it gets them back and the reconcile runs again, as its state would be lost if it were written
    over."""
    try:
        kube.apply(wanted, anew=True)
        return
    except (Conflict, Invalid) as error:
        refused = error
    live = _by_name(kube, wanted)
    if live is None:
        raise refused
    _check_living(live, wanted)
    _check_ours(live, wanted)
    meta, kind = wanted["metadata"], wanted["kind"]
    kept = live["metadata"].get("labels") or {}
    if not covers(kept, meta["labels"]):
        version = live["metadata"]["resourceVersion"]
        held = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
        labels = {"op": "add", "path": "/metadata/labels", "value": kept | meta["labels"]}
        kube.json_patch(kind, meta["namespace"], meta["name"], [held, labels])
    raise Conflict(f"{_name(wanted)} exists, which the list of ControllerRevisions lacked")


def _by_name(kube: Kube, wanted: Object) -> Object | None:
    """What has its name, read as the lists are."""
    meta = wanted["metadata"]
    live = kube.get(wanted["kind"], meta["namespace"], meta["name"])
    return released(kube, [live])[0] if live is not None else None


def _check_living(live: Object, wanted: Object) -> None:
    if live["metadata"].get("deletionTimestamp"):
        raise Deleting(f"{_name(wanted)} is being deleted")


def _admitted(after: Object, wanted: Object, corrections: Corrections) -> tuple[Dispute, ...]:
    """Of the API server's answer to a write."""
    left = _left(after, wanted)
    if not corrections.admit(after["metadata"]["uid"], wanted, left):
        return ()
    version = after["metadata"]["resourceVersion"]
    return _disputes(wanted, [_made(each, wanted) for each in left], End.ADMITTED, version)


def _made(difference: Difference, wanted: Object) -> str:
    """What admission has made of a field; of a list what it has added."""
    live, asked = difference.live, value_at(wanted, difference.steps)
    if isinstance(live, list) and (more := [item for item in live if item not in asked]):
        return f"{difference.path} has {json.dumps(more)[:100]} too"
    return f"{difference.path} is {json.dumps(live)[:100]}"


def _left(live: Object, wanted: Object) -> tuple[Difference, ...]:
    """What differs but for the additions of others."""
    return tuple(differences(drift.without(live, drift.foreign(live, wanted)), wanted))


def _kept(live: Object, wanted: Object) -> Object:
    """What is wanted, with what admission made of its pod template. Our wish for one never changes,
    as a new one is a new revision, so managedFields tell: also an operator that has just begun, and
    after the webhook is gone. To correct it would restart pods."""
    clean = drift.without(live, drift.foreign(live, wanted))
    found = (d for d in differences(clean, wanted) if d.steps[:2] == ("spec", "template"))
    admitted = [d for d in found if d.live is not None and drift.is_still_ours(clean, wanted, d)]
    kept = copy.deepcopy(wanted) if admitted else wanted
    for item in admitted:
        value_at(kept, item.steps[:-1])[item.steps[-1]] = item.live
    return dict(kept)


def _correct(
    kube: Kube, live: Object, wanted: Object, exact: bool, corrections: Corrections
) -> tuple[Dispute, ...]:
    every = drift.foreign(live, wanted)
    clean, uid = drift.without(live, every), live["metadata"]["uid"]
    version = live["metadata"]["resourceVersion"]
    found = tuple(item for item in every if not item.admitted)
    left = [d for d in differences(clean, wanted) if not corrections.admitted(uid, wanted, d)]
    if not found and not left:
        return ()
    _check_ours(live, wanted)
    changes: dict[str, Foreign | Difference] = {str(each): each for each in found}
    changes |= {_changed(clean, wanted, each): each for each in left}
    kept = [text for text in changes if corrections.exhausted(uid, wanted, text)]
    fresh = {text: each for text, each in changes.items() if text not in kept}
    tolerated = _disputes(wanted, kept, End.TOLERATED, version)
    if not fresh:
        return tolerated
    found = tuple(each for each in fresh.values() if isinstance(each, Foreign))
    left = [each for each in fresh.values() if isinstance(each, Difference)]
    after = _write(kube, live, wanted, exact, found, left)
    corrections.add(uid, wanted, fresh)
    theirs = (*found, *(each for each in left if _setters(clean, wanted, each)))
    named = [text for text, each in fresh.items() if each in theirs]
    disputes = _disputes(wanted, named, End.REMOVED, version)
    return (*tolerated, *(disputes or _admitted(after, wanted, corrections)))


def _write(
    kube: Kube,
    live: Object,
    wanted: Object,
    exact: bool,
    found: tuple[drift.Foreign, ...],
    left: Sequence[Difference],
) -> Object:
    """Returns the object as it is then."""
    if found:
        meta = live["metadata"]
        patch = drift.removal(live, found, wanted)
        cleaned = kube.json_patch(wanted["kind"], meta["namespace"], meta["name"], patch)
        if not left:
            return cleaned
    if live.get("immutable") and live.get("data") != wanted.get("data"):
        prune(kube, live, wanted["kind"])  # immutable: it can only be created again
        return kube.apply(wanted)
    return kube.apply(wanted, over=live, exact=exact)


def _disputes(
    wanted: Object, changes: Sequence[str], end: End, version: str
) -> tuple[Dispute, ...]:
    if not changes:
        return ()
    return (Dispute(f"{_name(wanted)}: {', '.join(changes[:5])}", end, version),)


def _changed(live: Object, wanted: Object, difference: Difference) -> str:
    """A field of ours that has another value, and who set that."""
    by = ", ".join(_setters(live, wanted, difference)) or "an admission webhook or policy"
    how = "taken away" if difference.live is None else f"set by {by}"
    return f"{difference.path} ({how})"


def _setters(live: Object, wanted: Object, difference: Difference) -> list[str]:
    """Field managers that have changed a field of ours; none where our wish is another now."""
    if drift.is_still_ours(live, wanted, difference):
        return []
    return drift.managers(live, difference.steps)


def _name(wanted: Object) -> str:
    return f"{wanted['kind']} {wanted['metadata']['name']}"


def _check_ours(live: Object, wanted: Object) -> None:
    """Raises NameConflict for a foreign object, Deleting for one that is still to be collected. An
    orphan is written over; an immutable one that has another content cannot be."""
    what = _name(wanted)
    owned = whose(live, wanted["metadata"]["ownerReferences"][0])
    if owned is Whose.EARLIER:
        raise Deleting(f"{what} of a deleted service of this name is not collected yet")
    immutable = wanted["kind"] == "ControllerRevision" and live.get("data") != wanted["data"]
    if owned is Whose.FOREIGN or (owned is Whose.ORPHAN and immutable):
        raise _conflict(wanted)


def _conflict(wanted: Object) -> NameConflict:
    what = _name(wanted)
    return NameConflict(
        f"{what} exists and is not this service's: rename one of the two, or delete it if it was"
    )


def prune(kube: Kube, live: Object, kind: str) -> None:
    """Deletes a child that is no longer wanted."""
    meta = live["metadata"]
    kube.delete(kind, meta["namespace"], meta["name"], meta["uid"])
