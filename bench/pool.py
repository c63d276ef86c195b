"""Replaces the page pools, which empties the prefix cache."""

from __future__ import annotations

from kvline_server.engine.engine import Engine
from kvline_server.memory.caches import Caches


def renew(engine: Engine, pages: tuple[int, ...] = ()) -> None:
    """New pools of so many pages, with the dummy pages, or of all; the engine must be idle."""
    counts = pages or engine.executor.pages
    caches = Caches(engine.caches.windows, counts, engine.scheduler.max_step_tokens)
    engine.caches = engine.scheduler.caches = caches
