"""Which release of the operator reconciles a namespace, where one was installed for it by name.

The chart of such a release leaves a ConfigMap in each of its namespaces. Two releases share no
Lease, so every other operator, that of the whole cluster above all, leaves these services alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvline_contract.names import CLAIM, CLAIM_KEY
from kvline_operator.kube import Kube

log = logging.getLogger("kvline")
FRESH = 2.0  # seconds that an answer is good for, of all services of a namespace


class Claims:
    def __init__(
        self, kube: Kube, own_namespace: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube = kube
        self._own = own_namespace
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}  # by namespace: when, and another release

    def other(self, namespace: str) -> str:
        """The namespace of another release that this one belongs to; empty where we reconcile."""
        at, before = self._known.get(namespace, (float("-inf"), ""))
        if self._clock() - at < FRESH:
            return before
        found: dict[str, Any] = self._kube.get("ConfigMap", namespace, CLAIM) or {}
        claimed = str((found.get("data") or {}).get(CLAIM_KEY) or "")
        other = "" if claimed == self._own else claimed
        self._known[namespace] = self._clock(), other
        if other and other != before:
            text = "namespace %s belongs to the operator in %s (ConfigMap %s): left to it"
            log.warning(text, namespace, other, CLAIM)
        if before and not other:
            log.info("namespace %s is reconciled here again", namespace)
        return other
