"""Tell: what the last reconcile of each service saw, for the metrics and the page.

In memory and read only: nothing is decided by it, and after a restart the first reconciles fill it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from kvline_operator.observe import PodView
from kvline_operator.revision_state import RevisionState
from kvline_operator.workqueue import Key

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RevisionEntry:
    """A revision and what became of it."""

    name: str
    number: int
    image: str
    created: str  # RFC 3339; empty for one that this reconcile made
    inputs: Object
    state: RevisionState
    named: bool = False  # the spec named the image


@dataclass(frozen=True, slots=True)
class View:
    key: Key
    spec: Object  # as it was applied
    status: Object
    pods: tuple[PodView, ...] = ()
    history: tuple[RevisionEntry, ...] = ()  # newest first


class StatusCache:
    """Threads write, threads read; a view is never changed once it is here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[Key, View] = {}

    def put(self, view: View) -> None:
        with self._lock:
            self._views[view.key] = view

    def refuse(self, key: Key, spec: Object, status: Object) -> None:
        """A spec that cannot be acted on: what serves is as it was."""
        with self._lock:
            before = self._views.get(key, View(key, spec, status))
            self._views[key] = replace(before, spec=spec, status=status)

    def drop(self, key: Key) -> None:
        with self._lock:
            self._views.pop(key, None)

    def get(self, key: Key) -> View | None:
        with self._lock:
            return self._views.get(key)

    def all(self) -> list[View]:
        with self._lock:
            return [self._views[key] for key in sorted(self._views)]


def past(stored: dict[str, Object], states: dict[str, RevisionState]) -> tuple[RevisionEntry, ...]:
    """ControllerRevisions by revision as history, newest first."""
    found = [
        RevisionEntry(
            name=name,
            number=item.get("revision", 0),
            image=item["data"].get("image", ""),
            named=bool(item["data"].get("imageNamed")),
            created=item["metadata"].get("creationTimestamp", ""),
            inputs=item["data"].get("inputs", {}),
            state=states.get(name, RevisionState()),
        )
        for name, item in stored.items()
    ]
    return tuple(sorted(found, key=lambda p: p.number, reverse=True))
