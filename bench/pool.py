"""Replaces the page pool, which empties the prefix cache."""

from __future__ import annotations

from kvline_server.engine.engine import Engine
from kvline_server.memory.pages import PagePool


def renew(engine: Engine, pages: int | None = None) -> None:
    """A new pool of `pages`, with the dummy page, or of the old size; the engine must be idle."""
    engine.pool = engine.scheduler.pool = PagePool(pages or engine.pool.total + 1)
