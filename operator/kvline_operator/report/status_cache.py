"""The last reconciled status of each service, in memory, for the metrics and the page.

No decision depends on it; after a restart the first reconciles fill it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from kvline_operator.api.inputs import read
from kvline_operator.api.key import Key
from kvline_operator.api.spec import canonical
from kvline_operator.observe.pods import PodView
from kvline_operator.plan.revisions import Revision, has_encoder
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import Phase

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RevisionEntry:
    """A revision with its stored state."""

    name: str
    number: int
    image: str
    created: str  # RFC 3339; empty for one created by this reconcile
    inputs: Object
    state: RevisionState
    phase: Phase = Phase.NEW
    named: bool = False  # its image is of spec.image, not the default
    images: str | None = None  # as a Revision's

    @property
    def revision(self) -> Revision:
        sees, inputs = has_encoder(self.state), canonical(self.inputs)
        return Revision(self.name, self.image, inputs, self.number, self.named, self.images, sees)


@dataclass(frozen=True, slots=True)
class View:
    key: Key
    spec: Object  # of the InferenceService
    status: Object
    pods: tuple[PodView, ...] = ()
    history: tuple[RevisionEntry, ...] = ()  # newest first


class StatusCache:
    """Thread-safe. Views are immutable."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[Key, View] = {}

    def put(self, view: View) -> None:
        with self._lock:
            self._views[view.key] = view

    def refuse(self, key: Key, spec: Object, status: Object) -> None:
        """Updates spec and status of a service whose spec is invalid; the rest is kept."""
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


def history(
    stored: dict[str, Object], states: dict[str, RevisionState], phases: dict[str, Phase]
) -> tuple[RevisionEntry, ...]:
    """The revisions of a service, newest first."""
    found = [
        RevisionEntry(
            name=name,
            number=item.get("revision", 0),
            image=item["data"].get("image", ""),
            named=bool(item["data"].get("imageNamed")),
            images=item["data"].get("images"),
            created=item["metadata"].get("creationTimestamp", ""),
            inputs=read(item["data"].get("inputs", {})),
            state=states.get(name, RevisionState()),
            phase=phases.get(name, Phase.NEW),
        )
        for name, item in stored.items()
    ]
    return tuple(sorted(found, key=lambda p: p.number, reverse=True))
