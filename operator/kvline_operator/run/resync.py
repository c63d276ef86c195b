"""Finds changes whose watch event was missed: services with an object of another resourceVersion
than its last event had.

Lists metadata only, in pages, and compares. To reconcile every service instead was most of the work
of an idle operator with hundreds of services.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kvline_contract.names import KIND, LABEL_MANAGED_BY, MANAGED_BY
from kvline_operator.api.key import Key
from kvline_operator.kube import Kube
from kvline_operator.observe.earlier_group import EarlierGroup
from kvline_operator.observe.ownership import CHILDREN, Owners

Listed = dict[str, tuple[Key, str]]  # by UID: its service and resourceVersion


class Resync:
    def __init__(self, kube: Kube, namespaces: tuple[str, ...], owners: Owners) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._owners = owners
        self.earlier = EarlierGroup(kube, namespaces)
        self._lock = threading.Lock()  # events arrive on another thread than resyncs
        self._versions: dict[str, str] = {}  # UID -> resourceVersion of its last event
        self._keys: dict[str, Key] = {}
        self._seen: set[str] = set()  # UIDs with an event since the last resync began
        self._unseen: set[str] = set()  # UIDs that the last resync found changed without one
        self.missed = 0  # of the latter, those without an event until the next resync

    def observe_event(self, key: Key | None, metadata: Mapping[str, Any], gone: bool) -> None:
        """Records an event of a service or a child; of a child also before its service is known."""
        with self._lock:
            uid = metadata["uid"]
            self._seen.add(uid)
            if gone:
                self._forget(uid)
                return
            self._versions[uid] = metadata["resourceVersion"]
            if key is not None:
                self._keys[uid] = key

    def changed(self) -> set[Key]:
        """Services that were created, deleted or changed, themselves or a child, without an event
        so far. Their current versions are recorded."""
        with self._lock:
            self.missed = len(self._unseen - self._seen)
            self._seen, self._unseen = set(), set()
        services, listed = self._list()
        self.earlier.check()
        with self._lock:
            return self._compare(services, listed)

    def _compare(self, services: set[Key], listed: Listed) -> set[Key]:
        self._keys |= {uid: key for uid, (key, _) in listed.items()}
        changed = set()
        for uid in self._keys.keys() - self._seen:  # an event meanwhile is newer than the list
            key, version = listed.get(uid, (self._keys[uid], None))
            if version == self._versions.get(uid):
                continue
            changed.add(key)
            if key in services:  # children of a deleted service do not matter
                self._unseen.add(uid)
            if version is None:
                self._forget(uid)
            else:
                self._versions[uid] = version
        return changed

    def _forget(self, uid: str) -> None:
        self._versions.pop(uid, None)
        self._keys.pop(uid, None)

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
