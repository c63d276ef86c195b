"""Services of the API group that the kind had before.

No operator of this version reconciles them. They are counted, so that nobody takes them for served.
"""

from __future__ import annotations

import logging

from kvline_contract.names import EARLIER_GROUP, GROUP, PLURAL
from kvline_operator.errors import Forbidden, Missing
from kvline_operator.kube import EARLIER_KIND, Kube

log = logging.getLogger("kvline")


class EarlierGroup:
    """Counts them, and says in the log when there are others than before."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...]) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self.services = 0
        self._forbidden = False

    def check(self) -> None:
        try:
            found = count(self._kube, self._namespaces)
        except Forbidden as error:  # of a role that is not this version's; all else works
            if not self._forbidden:
                log.warning("whether %s has services is unknown: %s", EARLIER_GROUP, error)
            self._forbidden = True
            return
        if found and found != self.services:
            log.warning("%s", text(found))
        self.services = found


def count(kube: Kube, namespaces: tuple[str, ...]) -> int:
    """0 where the API server does not serve that group."""
    try:
        return sum(1 for _ in kube.metadata(EARLIER_KIND, namespaces))
    except Missing:
        return 0


def text(services: int) -> str:
    return (
        f"{services} of {PLURAL}.{EARLIER_GROUP} exist, which this version does not reconcile: "
        f"move them to {PLURAL}.{GROUP} (docs/operations.md, From the group {EARLIER_GROUP})"
    )
