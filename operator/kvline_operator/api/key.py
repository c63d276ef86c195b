"""The name of a service: what the queue holds and the caches are keyed by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Key:
    namespace: str
    name: str
