"""The memory of recurrent states: slots of all recurrent layers, reserved at once.

Unlike pages of the KV cache, slots are as many as the settings ask for, whatever is free: one for
each sequence that may run, those of snapshots, and the dummy slot of padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from kvline_server.memory.device_errors import translated
from kvline_server.memory.state_shape import States, StateShape

_ALIGNMENT = 256  # bytes, of each layer's part


class StateArena:
    def __init__(
        self,
        shapes: Sequence[StateShape],
        slots: int,
        inputs: torch.dtype,
        matrices: torch.dtype,
        device: torch.device,
    ) -> None:
        """Of layers in the model's order, so many slots each, the dummy slot included. Raises
        DeviceOutOfMemory."""
        self.slots = slots
        parts = [
            part
            for shape in shapes
            for part in (((slots, *shape.inputs), inputs), ((slots, *shape.matrices), matrices))
        ]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
        *starts, self.nbytes = accumulate(map(_aligned, sizes), initial=0)
        with translated(f"reserving {slots} slots of recurrent states"):
            self._memory = self._allocate(device)
        views = [
            self._memory[at : at + size].view(dtype).view(shape)
            for at, size, (shape, dtype) in zip(starts, sizes, parts, strict=True)
        ]
        self._layers = [States(*pair) for pair in zip(views[::2], views[1::2], strict=True)]

    def _allocate(self, device: torch.device) -> torch.Tensor:
        """Written to, not only reserved: a host's memory is charged when it is touched. The dummy
        slot is finite from then on. uint8 [nbytes]"""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device).zero_()

    def layers(self) -> list[States]:
        """In the model's order."""
        return self._layers


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
