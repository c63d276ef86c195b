"""A service in a rollout from one revision to another; the played node acts at each poll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from waiting import eventually

from kvline_contract.names import LABEL_REVISION
from kvline_contract.report import State


class Service:
    """A service whose pods make progress only at `poll`."""

    def __init__(self, space: Any, node: Any) -> None:
        self.space, self.node = space, node
        self.tokens: dict[str, int] = {}  # tokens by revision; pods of others are still loading
        self.served: set[str] = set()  # revisions that had a ready pod at any time
        self.fewest_ready = 1 << 30

    def poll(self) -> dict[str, Any]:
        self.node.fetch()
        for pod in self.node.pods():
            revision = self.revision(pod)
            tokens = self.tokens.get(revision)
            if tokens:
                self.node.play(State.VALIDATED, tokens, only=lambda p, pod=pod: p == pod)
        ready = [p for p in self.node.pods() if is_ready(p)]
        self.served |= {self.revision(p) for p in ready}
        self.fewest_ready = min(self.fewest_ready, len(ready))
        return dict((self.space.get("kvl", "chat") or {}).get("status") or {})

    def until(
        self, check: Callable[[dict[str, Any]], Any], seconds: float = 60, on: str = "cluster"
    ) -> dict[str, Any]:
        def looked() -> dict[str, Any]:
            status = self.poll()
            return status if check(status) else {}

        return dict(eventually(looked, seconds, on))

    def until_reason(self, reason: str) -> dict[str, Any]:
        return self.until(lambda s: up_to_date(s).get("reason") == reason)

    def candidate(self) -> str:
        """The newest revision, once the operator has created it."""
        status = self.until(lambda s: s["rollout"].get("candidateRevision"))
        return str(status["rollout"]["candidateRevision"])

    def stable(self) -> str:
        return str(self.space.get("kvl", "chat")["status"]["rollout"]["stableRevision"])

    @staticmethod
    def revision(pod: dict[str, Any]) -> str:
        return str(pod["metadata"]["labels"][LABEL_REVISION])

    def pods_of(self, revision: str) -> list[dict[str, Any]]:
        return [p for p in self.node.pods() if self.revision(p) == revision]

    def until_pods(self, revision: str, count: int) -> list[dict[str, Any]]:
        self.until(lambda s: len(self.pods_of(revision)) == count)
        return self.pods_of(revision)

    def generation(self) -> int:
        return int(self.space.get("kvl", "chat")["metadata"]["generation"])

    def events(self, reason: str) -> list[str]:
        return [e["message"] for e in self.space.list("events") if e.get("reason") == reason]


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def up_to_date(status: dict[str, Any]) -> dict[str, Any]:
    found = [c for c in status.get("conditions") or [] if c["type"] == "UpToDate"]
    return dict(found[0]) if found else {}
