"""Recurrent states of a rank: reserved as the model loads, or refused with the numbers that fit."""

from __future__ import annotations

import torch

from kvline_contract.launch import StateDtype
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.kernels.interface import Kernels
from kvline_server.memory.state_arena import StateArena
from kvline_server.memory.state_shape import States, StateShape
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import served_in_bfloat16
from kvline_server.sizing.diagnosis import Diagnosis
from kvline_server.sizing.settings import EngineSettings
from kvline_server.sizing.slots import Slots, fitting, refused

DTYPES = {StateDtype.FLOAT32: torch.float32, StateDtype.BFLOAT16: torch.bfloat16}


def slot_bytes(shapes: tuple[StateShape, ...], inputs: torch.dtype, dtype: StateDtype) -> int:
    """Of a slot of a rank's recurrent layers, with matrices of this dtype."""
    return sum(each.nbytes(inputs, DTYPES[dtype]) for each in shapes)


def slots(
    shapes: tuple[StateShape, ...],
    model: ModelConfig,
    settings: EngineSettings,
    inputs: torch.dtype,
) -> Slots:
    """Those that are asked for, and what one would take in bfloat16 where that can be asked for."""
    small = StateDtype.BFLOAT16
    other = settings.state_dtype is not small and served_in_bfloat16(model.recurrent)
    in_bfloat16 = slot_bytes(shapes, inputs, small) if other else 0
    return Slots.of(settings, slot_bytes(shapes, inputs, settings.state_dtype), in_bfloat16)


def check(slots: Slots, rank: Diagnosis, free: int) -> None:
    """Whether they fit in so many bytes beside what the rank has. Raises OutOfMemory."""
    rank.owned = (*rank.owned, *slots.parts())
    if slots.nbytes and slots.reserved + rank.settings.reserved() > free:
        raise rank.slots_do_not_fit(free, fitting(rank.settings, slots.nbytes, free))


def states(
    shapes: tuple[StateShape, ...], slots: Slots, rank: Diagnosis, kernels: Kernels
) -> list[States]:
    """States of all recurrent layers, beside the weights. Raises OutOfMemory."""
    count, dtypes = rank.settings.state_slots, (kernels.dtype, DTYPES[slots.dtype])
    try:
        return StateArena(shapes, count, *dtypes, kernels.device).layers()
    except DeviceOutOfMemory as error:
        free = rank.limit - rank.device.used()
        raise rank.slots_do_not_fit(free, refused(rank.settings, slots.nbytes, free)) from error
