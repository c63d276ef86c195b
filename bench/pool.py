"""A page pool that remembers nothing, so that no prompt is found in the prefix cache."""

from __future__ import annotations

from kvline_server.engine.engine import Engine
from kvline_server.memory.pages import PagePool


def renew(engine: Engine, pages: int | None = None) -> None:
    """Of `pages` with the one that pads, or of as many as it had; the engine must be idle."""
    engine.pool = engine.scheduler.pool = PagePool(pages or engine.pool.total + 1)
