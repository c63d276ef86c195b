"""What other managers have added to an object of ours, by its managedFields. Pure.

Server-side apply restores our fields, but merges lists by key and keeps what only others set. In a
pod template such an addition rolls pods past the gate, in a selector it takes all pods away, and an
extra item in a list of ours would be a difference for ever. Additions elsewhere (a Service's type,
annotations) are allowed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvline_contract.names import FIELD_MANAGER
from kvline_operator.apply.difference import Difference, Step, value_at

Object = dict[str, Any]
# Kinds in which an additional field contradicts ours, so that the API server refuses both together.
WHOLE = ("PodDisruptionBudget", "NetworkPolicy")
# Fields that are ours alone even where we leave them out: with this one, pods that their gate keeps
# out of traffic would get it.
OURS = {"Service": ("spec", "publishNotReadyAddresses")}
SELECTORS = ("selector", "podSelector", "matchLabels")
APPLIED = (FIELD_MANAGER, "Apply")
LIMIT, WINDOW = 5, 3600.0  # corrections of one change to an object, in so many seconds
MOST = 4 * LIMIT  # of the object: a manager may set another field each time
MAX_ADMITTED = 8192  # objects; the one written first is written once more


@dataclass(frozen=True, slots=True)
class Foreign:
    """A field or list item that only another manager has set."""

    steps: tuple[Step, ...]  # keys and indices in the live object
    path: str  # for messages
    manager: str
    within: tuple[Step, ...] = ()  # what it is in, in the wanted object

    def __str__(self) -> str:
        return f"{self.path} (set by {self.manager})"

    @property
    def admitted(self) -> bool:
        """Whether the API server added it to a write of ours: a default in place of a removed
        value, or a change by a mutating admission webhook, which is the cluster's policy and would
        come back each time."""
        return self.manager == FIELD_MANAGER

    @property
    def is_ours(self) -> bool:
        """Whether it is in what only we may set: a list, a selector or a pod template of ours."""
        within = self.steps[:-1]
        is_item = isinstance(self.steps[-1], int)
        return is_item or within[-1] in SELECTORS or within[:2] == ("spec", "template")


def foreign(live: Object, wanted: Object) -> tuple[Foreign, ...]:
    """What to remove, in an order in which no list index shifts: later items first."""
    found: dict[tuple[Step, ...], Foreign] = {}
    entries = live["metadata"].get("managedFields") or []
    whole = wanted["kind"] in WHOLE
    ours = OURS.get(wanted["kind"])
    for entry in sorted(entries, key=lambda e: e.get("manager") == FIELD_MANAGER):
        applied = entry.get("operation") == "Apply" and entry.get("manager") == FIELD_MANAGER
        fields = (entry.get("fieldsV1") or {}).get("f:spec")
        if applied or entry.get("subresource") or not fields:
            continue
        begin = Foreign(("spec",), "spec", str(entry.get("manager") or "unknown"), ("spec",))
        for item in _walk(fields, live.get("spec"), wanted.get("spec") or {}, begin):
            if whole or item.steps == ours or item.is_ours:
                found.setdefault(item.steps, item)
    order = [[(isinstance(s, int), s) for s in steps] for steps in found]
    return tuple(f for _, f in sorted(zip(order, found.values(), strict=True), reverse=True))


def _walk(fields: Object, live: Any, wanted: Any, parent: Foreign) -> Iterator[Foreign]:
    """What `fields`, of fieldsV1, adds to `wanted`, of which `parent` is within."""
    if not fields and isinstance(live, dict) and isinstance(wanted, dict):
        fields = {f"f:{key}": {} for key in live}  # a map that has one owner, such as a selector
    for key, below in fields.items():
        step = _find(key, live)
        if key == "." or step is None:
            continue
        shown = f".{step}" if isinstance(step, str) else f"[{_label(key, step)}]"
        steps, path = (*parent.steps, step), parent.path + shown
        there = _find(key, wanted)
        if there is None:
            yield Foreign(steps, path, parent.manager, parent.within)
            continue
        here = Foreign(steps, path, parent.manager, (*parent.within, there))
        yield from _walk(below, live[step], wanted[there], here)


def _find(key: str, value: Any) -> Step | None:
    """The key or index that a key of fieldsV1 means in a value; None where it is absent."""
    kind, _, rest = key.partition(":")
    if kind == "f":
        return rest if isinstance(value, dict) and value.get(rest) is not None else None
    if kind not in ("k", "v") or not isinstance(value, list):
        return None
    asked = json.loads(rest)
    for index, item in enumerate(value):
        if kind == "v" and item == asked:
            return index
        if kind == "k" and isinstance(item, dict) and asked.items() <= item.items():
            return index
    return None


def managers(live: Object, steps: tuple[Step, ...]) -> list[str]:
    """Field managers but ours that have set this field, by any subresource such as scale; none
    where admission has."""
    entries = live["metadata"].get("managedFields") or []
    others = [e for e in entries if e.get("manager") != FIELD_MANAGER]
    found = [e for e in others if _fields_at(e.get("fieldsV1") or {}, live, steps) is not None]
    return sorted({str(e.get("manager") or "unknown") for e in found})


def is_still_ours(live: Object, wanted: Object, difference: Difference) -> bool:
    """Whether our last apply has this field: who changes or removes one takes it, but admission,
    which changes what is applied. True also of a wish that has changed since."""
    entries = live["metadata"].get("managedFields") or []
    applied = [e for e in entries if (e.get("manager"), e.get("operation")) == APPLIED]
    at = [_fields_at(e.get("fieldsV1") or {}, live, difference.steps) for e in applied]
    items = [[k for k in fields if k[:2] in ("k:", "v:")] for fields in at if fields is not None]
    if not isinstance(difference.live, list):
        return bool(items)
    asked = len(value_at(wanted, difference.steps))
    return any(not keys or len(keys) >= asked for keys in items)


def _fields_at(fields: Object, live: Any, steps: tuple[Step, ...]) -> Object | None:
    """What fieldsV1 has of a field; None where it lacks it."""
    for step in steps:
        if not fields:
            return fields  # a leaf, with all that is below it
        key = next((k for k in fields if k == f"f:{step}" or _find(k, live) == step), None)
        if key is None:
            return None
        fields = fields[key]
        live = live.get(step) if isinstance(live, dict) else live[step]
    return fields


def _label(key: str, index: int) -> str:
    value = json.loads(key[2:])
    return ",".join(str(v) for v in value.values()) if isinstance(value, dict) else str(index)


def without(live: Object, found: tuple[Foreign, ...]) -> Object:
    """The live object without them."""
    if not found:
        return live
    out = copy.deepcopy(live)
    for item in found:
        del value_at(out, item.steps[:-1])[item.steps[-1]]
    return out


def removal(live: Object, found: tuple[Foreign, ...], wanted: Object) -> list[Object]:
    """The removal as a JSON patch, which fails where the object has changed since. A list of which
    nothing would be left is replaced by what is wanted: a port or a container whose key somebody
    has changed is another item, and such a list may not be without one for a moment."""
    version = live["metadata"]["resourceVersion"]
    held = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
    lists: dict[tuple[Step, ...], list[Foreign]] = {}
    for item in found:
        if isinstance(item.steps[-1], int):
            lists.setdefault(item.steps[:-1], []).append(item)
    emptied = {
        steps: value_at(wanted, items[0].within)
        for steps, items in lists.items()
        if len(items) == len(value_at(live, steps)) and value_at(wanted, items[0].within)
    }
    # Before items of other lists are removed, which would shift what these lists are in.
    replaced = [
        {"op": "replace", "path": _pointer(steps), "value": items}
        for steps, items in emptied.items()
    ]
    rest = (f for f in found if f.steps[:-1] not in emptied)
    return [held, *replaced, *({"op": "remove", "path": _pointer(f.steps)} for f in rest)]


def _pointer(steps: tuple[Step, ...]) -> str:
    return "".join("/" + str(s).replace("~", "~0").replace("/", "~1") for s in steps)


class Corrections:
    """How often a change to an object was corrected, by what was set and by whom. After LIMIT
    corrections it is tolerated and its manager reported: pods that roll for ever are worse than the
    change. Others to the same object are corrected all the same.

    And what the API server answered to a write with: a difference in that was made by admission,
    the cluster's policy, and would be made again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: dict[str, tuple[bytes, list[tuple[float, frozenset[str]]]]] = {}  # by UID
        self._admitted: OrderedDict[str, tuple[bytes, frozenset[str]]] = OrderedDict()  # by UID

    def admit(self, uid: str, wanted: Object, left: Sequence[Difference]) -> bool:
        """Whether that is news: of an earlier wish it may be known."""
        _, known = self._admitted.pop(uid, (b"", frozenset()))
        found = frozenset(map(_text, left))
        if found:
            self._admitted[uid] = _digest(wanted), found
        if len(self._admitted) > MAX_ADMITTED:
            self._admitted.popitem(last=False)
        return not known.issuperset(found)

    def admitted(self, uid: str, wanted: Object, difference: Difference) -> bool:
        """Whether admission made it."""
        digest, known = self._admitted.get(uid, (b"", frozenset()))
        return _text(difference) in known and digest == _digest(wanted)

    def exhausted(self, uid: str, wanted: Object, change: str) -> bool:
        recent = self._recent(uid, wanted)
        return sum(change in made for _, made in recent) >= LIMIT or len(recent) >= MOST

    def add(self, uid: str, wanted: Object, changes: Iterable[str]) -> None:
        recent = self._recent(uid, wanted)
        now = self._clock()
        stale = [u for u, (_, made) in list(self._done.items()) if made[-1][0] < now - WINDOW]
        for other in stale:
            self._done.pop(other, None)
        self._done[uid] = _digest(wanted), [*recent, (now, frozenset(changes))]

    def _recent(self, uid: str, wanted: Object) -> list[tuple[float, frozenset[str]]]:
        """Time and changes of recent corrections; none where the wish has changed since."""
        digest, made = self._done.get(uid, (b"", []))
        if digest != _digest(wanted):
            return []
        return [each for each in made if each[0] > self._clock() - WINDOW]


def _text(difference: Difference) -> str:
    return json.dumps([difference.steps, difference.live], sort_keys=True)


def _digest(wanted: Object) -> bytes:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).digest()
