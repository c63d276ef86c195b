"""What more slots of recurrent states cost, where the spec itself asks for other numbers. Pure.

A slot takes memory that KV tokens would have; how many follows from the bytes of both. So much is
asked for by the spec, and no more: the gate takes it from the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvline_contract.counts import counted
from kvline_contract.launch import usual_snapshots
from kvline_operator.observe.slots import Slots


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a spec; None: the server's default."""

    requests: int | None = None  # spec.engine.maxRunningRequests
    snapshots: int | None = None  # spec.engine.prefixSnapshots
    # By spec.capacity.kvTokens; no part of what is traded.
    pinned: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Asked:
        engine, capacity = inputs.get("engine") or {}, inputs.get("capacity") or {}
        pinned = capacity.get("kvTokens") is not None
        return cls(engine.get("maxRunningRequests"), engine.get("prefixSnapshots"), pinned)

    def expected(self, before: Slots) -> Slots:
        """What a replica will have that is not measured yet. The server's default of requests is
        taken as it was; forecast.as_many_run says whether it is."""
        requests, snapshots = self.requests or before.sequences, self.snapshots
        if snapshots is None:
            snapshots = usual_snapshots(requests)
        return Slots(requests, snapshots, before.slot_bytes)


@dataclass(frozen=True, slots=True)
class Trade:
    requests: int  # more than before
    snapshots: int
    tokens: int  # KV tokens fewer; below 0: more

    @classmethod
    def of(cls, before: Slots, now: Slots, old: Asked, new: Asked, token_bytes: int) -> Trade:
        """A number that the spec has not changed is no part of it; a default may follow the
        other: of both what the server chooses by what is left."""
        chosen = new.requests is None and new != old
        requests = now.sequences - before.sequences
        requests = requests if chosen or new.requests != old.requests else 0
        snapshots = now.snapshots - before.snapshots if new != old else 0
        cost = (requests + snapshots) * now.slot_bytes
        return cls(requests, snapshots, round(cost / max(1, token_bytes)))

    @property
    def text(self) -> str:
        """Such as: +256 requests cost 574000 KV tokens. Empty where nothing is traded."""
        changes = ((self.requests, "request"), (self.snapshots, "snapshot"))
        named = " and ".join(f"{'+' * (n > 0)}{counted(n, what)}" for n, what in changes if n)
        if not named:
            return ""
        effect = "cost" if self.tokens >= 0 else "leave"
        more = " more" if self.tokens < 0 else ""
        return f"{named} {effect} {abs(self.tokens)}{more} KV tokens"
