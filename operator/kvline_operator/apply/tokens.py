"""Tokens of the operator's notices to pods, one for each revision: in memory alone.

A pod knows a token by its digest in the revision's gate file, which was there before the pod.
Another operator, or this one after a restart, has not got it: its notices would be refused, and
what a gate file says counts when the kubelet brings it.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from hashlib import sha256

MAX_ENTRIES = 8192  # revisions; the one used least recently is dropped


Revision = tuple[str, str]  # UID of the service, and the revision's name


class Tokens:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # reconciles run on several threads
        self._kept: OrderedDict[Revision, str] = OrderedDict()

    def of(self, revision: Revision) -> str:
        """Empty where this operator has none."""
        with self._lock:
            return self._kept.get(revision, "")

    def digest(self, revision: Revision, written: str | None, renew: bool) -> str | None:
        """For the gate file, which has `written` now: of the token, which is made where there is
        none and `renew` asks for one. Else the file keeps what it has: a restarted operator
        rewrites none of those that it finds."""
        with self._lock:
            token = self._kept.get(revision) or (secrets.token_hex(32) if renew else None)
            if token is None:
                return written
            self._kept[revision] = token
            self._kept.move_to_end(revision)
            if len(self._kept) > MAX_ENTRIES:
                self._kept.popitem(last=False)
            return sha256(token.encode()).hexdigest()
