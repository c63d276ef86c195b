"""Which release of the operator reconciles a namespace, where one was installed for it by name.

Such a release has RoleBinding kvline-operator in each of its namespaces, for its ServiceAccount.
The API server lets nobody bind a role who has not its rights, so none is made by those who may only
edit a namespace. Two releases share no Lease, so every other operator, that of the whole cluster
above all, leaves these services alone as long as the Lease of the release is renewed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvline_contract.names import OPERATOR
from kvline_operator.errors import Forbidden
from kvline_operator.kube import Kube

log = logging.getLogger("kvline")
Object = dict[str, Any]
FRESH = 2.0  # seconds that an answer is good for, of all services of a namespace
# Seconds without a change of its Lease after which a release counts as gone. Long: while it is
# upgraded, or its node is lost, its services must not change hands.
GONE = 300.0
# Seconds from the Lease to the first reconcile in a namespace that is ours by name: for so long
# others may still go by what they read before, and two that write the same objects correct each
# other.
HANDOVER = FRESH + 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a namespace, by another release."""

    release: str  # its namespace; empty for none
    lives: bool = False

    @property
    def holder(self) -> str:
        """Whom the namespace is left to; empty where it is reconciled here."""
        return self.release if self.lives else ""


NONE = Claim("")


class Claims:
    def __init__(
        self,
        kube: Kube,
        own_namespace: str,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._kube = kube
        self._own = own_namespace
        self._clock = clock
        self._pause = pause
        self._begun: float | None = None  # when we first reconciled what is ours by name
        self._known: dict[str, tuple[float, Claim]] = {}  # by namespace
        self._leases: dict[str, tuple[float, str]] = {}  # by release: last change, and version

    def other(self, namespace: str) -> str:
        """The namespace of another release that this one is left to; empty where we reconcile."""
        at, before = self._known.get(namespace, (float("-inf"), NONE))
        if self._clock() - at < FRESH:
            return before.holder
        bound = self._bound(namespace)
        release = "" if self._own in bound else next(iter(bound), "")
        if self._own in bound:
            self._wait_for_others()
        claim = Claim(release, self._lives(release)) if release else NONE
        self._known[namespace] = self._clock(), claim
        if claim != before:
            _log(namespace, claim)
        return claim.holder

    def known(self) -> dict[str, Claim]:
        """By namespace, as last read; for metrics."""
        return {name: claim for name, (_, claim) in list(self._known.items()) if claim != NONE}

    def _wait_for_others(self) -> None:
        if self._begun is None:
            self._begun = self._clock()
        if (rest := self._begun + HANDOVER - self._clock()) > 0:
            self._pause(rest)

    def _bound(self, namespace: str) -> list[str]:
        """Namespaces of the releases that it belongs to."""
        found = self._kube.get("RoleBinding", namespace, OPERATOR) or {}
        if (found.get("roleRef") or {}).get("name") != OPERATOR:
            return []
        return [
            str(subject.get("namespace", ""))
            for subject in found.get("subjects") or []
            if (subject.get("kind"), subject.get("name")) == ("ServiceAccount", OPERATOR)
        ]

    def _lives(self, release: str) -> bool:
        """By changes of its Lease on our own clock, because wall clocks may differ."""
        try:
            lease = self._kube.get("Lease", release, OPERATOR)
        except Forbidden:
            return True  # a Role in single namespaces does not show it
        if lease is None:
            return False
        version = str(lease["metadata"]["resourceVersion"])
        changed, before = self._leases.get(release, (0.0, ""))
        if version != before:
            changed = self._clock()
            self._leases[release] = changed, version
        return self._clock() - changed < GONE


def _log(namespace: str, claim: Claim) -> None:
    what = f"namespace {namespace} belongs to the operator in {claim.release} (by its RoleBinding)"
    if claim.lives:
        log.warning("%s: left to it", what)
    elif claim.release:
        log.warning("%s, which does not renew its Lease: it is reconciled here", what)
    else:
        log.info("namespace %s is reconciled here again", namespace)
