"""Replaces the page pools, which empties the prefix cache."""

from __future__ import annotations

from kvline_server.engine.engine import Engine
from kvline_server.memory.caches import Caches
from kvline_server.memory.states import StatePool


def renew(engine: Engine, pages: tuple[int, ...] = ()) -> None:
    """New pools of so many pages, with the dummy pages, or of all, and of recurrent states; the
    engine must be idle."""
    counts = pages or engine.executor.pages
    states = engine.caches.states
    if states is not None:
        states = StatePool(states.running, states.snapshots)
    caches = Caches(engine.caches.windows, counts, engine.scheduler.max_step_tokens, states)
    engine.caches = engine.scheduler.caches = caches
