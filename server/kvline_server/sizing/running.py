"""How many requests run at once where the spec does not say, and each has a fixed cost: the windows
of sliding-window layers and the states of recurrent ones are reserved for all that may run,
whatever is left for the KV cache."""

from __future__ import annotations

from kvline_contract.launch import LaunchConfig
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.groups import order
from kvline_server.memory.parts import OwnedPart, growing
from kvline_server.model.config import ModelConfig
from kvline_server.sizing.settings import EngineSettings, score_bytes

FEWEST = 8
LEAST = 4  # fewer than FEWEST run where these leave less than 1/LEAST to the KV cache
GROWTH = 32 * MIB  # on a CPU, of kernels' buffers and heaps until steps have run: 16 to 30 seen


def open_to_sizing(launch: LaunchConfig, model: ModelConfig, settings: EngineSettings) -> bool:
    """Whether the number depends on what is left."""
    windows = order(model.every_window, settings.wanted_len)
    fixed = len(windows) > 1 or settings.recurrent
    return launch.engine.max_running_requests is None and fixed


def left(device: Device, settings: EngineSettings, loaded: int, vocabulary: int) -> int:
    """Bytes for the KV cache and its windows, before `loaded` bytes are loaded. On a GPU they are
    counted from its size, not from what is free now: replicas on one kind of node run as many. A
    CPU's container is the pod's own, and what its processes and a step take is much of a small one.
    """
    beside = loaded + settings.reserved()
    if not device.gpu:
        step = score_bytes(settings.logprob_rows, vocabulary) + GROWTH
        beside += device.used() + device.working_files() + device.slack + step
    return device.limit - beside


def bounded(
    settings: EngineSettings, cache: tuple[OwnedPart, ...], left: int, state: int = 0
) -> int:
    """The most requests of the default, its half and so on down to FEWEST, which leave at least
    half of `left` bytes to the KV cache; fewer where FEWEST would leave too little for a start. A
    slot of recurrent states takes `state` bytes."""

    def mapped(running: int, tokens: int = 0) -> int:
        slots = settings.changed(max_running_requests=running).state_slots
        return growing(cache, tokens, running, settings.mapped_rows) + slots * state

    running = settings.max_running_requests
    while running > FEWEST and mapped(running) > left // 2:
        running = max(FEWEST, running // 2)
    asked = settings.max_model_len or 0
    while running > 1 and (left - mapped(running) < left // LEAST or mapped(running, asked) > left):
        running //= 2
    return running
