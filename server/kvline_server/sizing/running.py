"""How many requests run at once where the spec does not say, and each has a fixed cost: the windows
of sliding-window layers are reserved for all that may run, whatever is left for the KV cache."""

from __future__ import annotations

from kvline_server.memory.parts import OwnedPart, growing
from kvline_server.sizing.settings import EngineSettings

FEWEST = 8


def bounded(settings: EngineSettings, cache: tuple[OwnedPart, ...], left: int) -> int:
    """The most requests of the default, its half and so on down to FEWEST, which leave at least
    half of `left` bytes to the KV cache. What is left is counted from the device's size and the
    weights, not from what is free now: replicas on one kind of node run as many."""
    running = settings.max_running_requests
    while running > FEWEST and growing(cache, 0, running, settings.mapped_rows) > left // 2:
        running = max(FEWEST, running // 2)
    return running
