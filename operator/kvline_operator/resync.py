"""What no event told: services with an object of another version than the last event of it said.

Lists metadata alone, in pages, and compares. Looking at every service instead was most of what an
idle operator did with hundreds of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kvline_contract.names import KIND, LABEL_MANAGED_BY, MANAGED_BY
from kvline_operator.kube import Kube
from kvline_operator.owners import CHILDREN, Owners
from kvline_operator.workqueue import Key

Listed = dict[str, tuple[Key, str]]  # by uid: whose, and its version


class Resync:
    def __init__(self, kube: Kube, namespaces: tuple[str, ...], owners: Owners) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._owners = owners
        self._lock = threading.Lock()  # events come on another thread than looks
        self._heard: dict[str, str] = {}  # uid -> version, whosever it is
        self._whose: dict[str, Key] = {}
        self._told: set[str] = set()  # uids that events were about since the last look began
        self._untold: set[str] = set()  # uids that the last look found changed without one
        self.missed = 0  # of these, how many no event had told of by the next look

    def hear(self, key: Key | None, metadata: Mapping[str, Any], gone: bool) -> None:
        """An event of a service, or of a child of it; of a child also when it comes before its
        service is known."""
        with self._lock:
            uid = metadata["uid"]
            self._told.add(uid)
            if gone:
                self._forget(uid)
                return
            self._heard[uid] = metadata["resourceVersion"]
            if key is not None:
                self._whose[uid] = key

    def changed(self) -> set[Key]:
        """Services that came, went, or have an object that came, went or changed, and no event has
        said so yet. What they have now counts as heard."""
        with self._lock:
            self.missed = len(self._untold - self._told)
            self._told, self._untold = set(), set()
        services, listed = self._list()
        with self._lock:
            return self._compare(services, listed)

    def _compare(self, services: set[Key], listed: Listed) -> set[Key]:
        self._whose |= {uid: key for uid, (key, _) in listed.items()}
        changed = set()
        for uid in self._whose.keys() - self._told:  # an event meanwhile knows better
            key, version = listed.get(uid, (self._whose[uid], None))
            if version == self._heard.get(uid):
                continue
            changed.add(key)
            if key in services:  # what a deleted one leaves behind is nobody's news
                self._untold.add(uid)
            if version is None:
                self._forget(uid)
            else:
                self._heard[uid] = version
        return changed

    def _forget(self, uid: str) -> None:
        self._heard.pop(uid, None)
        self._whose.pop(uid, None)

    def _list(self) -> tuple[set[Key], Listed]:
        listed: Listed = {}
        services = set()
        for meta in self._kube.metadata(KIND, self._namespaces):
            key = Key(meta["namespace"], meta["name"])
            self._owners.add(key)
            services.add(key)
            listed[meta["uid"]] = key, meta["resourceVersion"]
        for kind in CHILDREN:
            ours = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
            for meta in self._kube.metadata(kind, self._namespaces, ours):
                owner = self._owners.of(meta)
                if owner in services:
                    listed[meta["uid"]] = owner, meta["resourceVersion"]
        return services, listed
