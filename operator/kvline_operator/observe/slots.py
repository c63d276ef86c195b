"""Slots of recurrent states that a replica has, where layers of its model keep a state. Pure."""

from __future__ import annotations

from kvline_contract.codec import document, field
from kvline_contract.report import Result


@document
class Slots:
    """Each has its memory from the start on, whether it is taken or not."""

    sequences: int = field(low=1)  # that run at once
    snapshots: int  # states kept for prefixes
    slot_bytes: int  # of one, on each rank

    @classmethod
    def of(cls, result: Result) -> Slots | None:
        if result.state_slots is None:
            return None
        return cls(result.state_slots, result.snapshots or 0, result.slot_bytes or 0)
