"""Status.capacity, of the ready replicas; stored for the time in which none is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvline_contract.codec import ContractError, decode, document, dumps, encode, field, loads
from kvline_contract.memory import STORED_PARTS, Memory, MemoryV1, Part, rank_title
from kvline_contract.report import (
    MAX_RANKS,
    MAX_REPORT_BYTES,
    Provenance,
    Result,
    SizingReport,
    Source,
)
from kvline_contract.times import FORMAT
from kvline_operator.observe.slots import Slots

MAX_BYTES = 2 * MAX_REPORT_BYTES  # the memory of the binding rank is in it twice


@document
class Spread:
    min: int
    max: int


@document
class RankMemory:
    """Memory of one of several ranks. `gpu`: the index of its GPU in the pod; None on the CPU."""

    rank: int = field(high=MAX_RANKS - 1)
    total_mib: int = field("totalMiB")
    parts: tuple[Part, ...] = field(items=STORED_PARTS)
    gpu: int | None = field(high=255, omit_none=True, default=None)

    def __post_init__(self) -> None:
        Memory(self.total_mib, self.parts)  # which checks that they add up

    @property
    def memory(self) -> Memory:
        return Memory(self.total_mib, self.parts, self.gpu)

    def title(self, ranks: int, binding: int | None) -> str:
        return rank_title(self.rank, ranks, self.gpu is not None, self.rank == binding)


@document
class CapacityStatus:
    """Figures of the ready replica with the fewest KV tokens, and of its binding rank; of sequences
    the fewest that a replica has."""

    kv_tokens: int = field("kvTokens", low=1)
    kv_tokens_total: int = field("kvTokensTotal")
    spread: Spread
    bytes_per_token: int
    memory: MemoryV1  # users and operators of version 1 read it
    attempts: int
    measured_at: str = field(limit=32)
    source: Source
    fingerprint: str = field(limit=64)
    provenance: Provenance | None = field(omit_none=True, default=None)
    full_length_sequences: int | None = field(omit_none=True, default=None)
    cache_dtype: str | None = field(limit=16, omit_none=True, default=None)
    as_of: str | None = field(
        limit=32, omit_none=True, default=None
    )  # RFC 3339: when the last replica stopped serving
    # Where there are several ranks:
    ranks: tuple[RankMemory, ...] | None = field(items=MAX_RANKS, omit_none=True, default=None)
    binding_rank: int | None = field(high=MAX_RANKS - 1, omit_none=True, default=None)
    # Where layers have sliding windows; as bytes_per_token where these free nothing:
    full_bytes_per_token: int | None = field(omit_none=True, default=None)
    # Where layers keep recurrent states, slots of these, the bytes of one and its dtype, and the
    # bytes of one in bfloat16 where that is served and was not asked for:
    sequences: int | None = field(omit_none=True, default=None)
    snapshots: int | None = field(omit_none=True, default=None)
    slot_bytes: int | None = field(omit_none=True, default=None)
    state_dtype: str | None = field(limit=16, omit_none=True, default=None)
    bfloat16_slot_bytes: int | None = field(omit_none=True, default=None)

    def __post_init__(self) -> None:
        """Checked here: the API server refuses another format, and annotations can be edited."""
        try:
            if self.as_of is not None:
                datetime.strptime(self.as_of, FORMAT)
        except ValueError:
            raise ContractError("asOf: expected a time such as 2026-01-31T12:00:00Z") from None

    @property
    def compared_bytes(self) -> int:
        """As a Result's."""
        return self.full_bytes_per_token or self.bytes_per_token

    @property
    def slots(self) -> Slots | None:
        if self.sequences is None:
            return None
        return Slots(self.sequences, self.snapshots or 0, self.slot_bytes or 0)

    @property
    def identity(self) -> tuple[object, ...]:
        """What is stored anew where it changes."""
        states = self.sequences, self.snapshots, self.state_dtype
        return self.kv_tokens, self.fingerprint, *states

    @classmethod
    def of(cls, reports: Iterable[SizingReport | None]) -> CapacityStatus | None:
        """From sizing reports; None where no replica has a size."""
        sized = [(r, r.result) for r in reports if r is not None and r.result is not None]
        if not sized:
            return None
        report, result = min(sized, key=lambda pair: pair[1].kv_tokens)
        tokens = [r.kv_tokens for _, r in sized]
        held = [r.sequences(rep.effective.max_model_len) for rep, r in sized if rep.effective]
        slots = [r.state_slots for _, r in sized if r.state_slots is not None]
        return cls(
            kv_tokens=result.kv_tokens,
            kv_tokens_total=sum(tokens),
            spread=Spread(min(tokens), max(tokens)),
            bytes_per_token=result.bytes_per_token,
            memory=MemoryV1.of(result.memory),
            attempts=max([1, *(a.number for a in report.attempts)]),
            measured_at=result.measured_at,
            source=result.source,
            fingerprint=result.fingerprint,
            provenance=report.provenance,
            full_length_sequences=min(held, default=None),
            cache_dtype=result.cache_dtype,
            ranks=ranks(result) or None,
            binding_rank=result.binding_rank if len(result.ranks) > 1 else None,
            full_bytes_per_token=result.full_bytes_per_token,
            sequences=min(slots, default=None),
            snapshots=result.snapshots,
            slot_bytes=result.slot_bytes,
            state_dtype=result.state_dtype,
            bfloat16_slot_bytes=result.bfloat16_slot_bytes,
        )

    @classmethod
    def parse(cls, text: str) -> CapacityStatus | None:
        """From an annotation; None where it is unreadable."""
        try:
            return decode(cls, loads(text, MAX_BYTES), strict=False)
        except ContractError:
            return None

    def dumps(self) -> str:
        return dumps(self)


def ranks(result: Result) -> tuple[RankMemory, ...]:
    """Of a replica with several; empty with one."""
    if len(result.ranks) == 1:
        return ()
    found = enumerate(map(Memory.stored, result.ranks))
    return tuple(RankMemory(number, rank.total_mib, rank.parts, rank.gpu) for number, rank in found)


def retained(
    kept: CapacityStatus | None, now: CapacityStatus | None, stamp: str
) -> CapacityStatus | None:
    """What is stored of a revision. It does not change with the number of replicas; `as_of` is set
    when none is ready any more."""
    if now is None:
        return replace(kept, as_of=stamp) if kept is not None and kept.as_of is None else kept
    if kept is not None and kept.identity == now.identity:
        return replace(kept, as_of=None)
    alone = Spread(now.kv_tokens, now.kv_tokens)
    return replace(now, kv_tokens_total=0, spread=alone)


def capacity(
    now: CapacityStatus | None, kept: CapacityStatus | None, serving: bool
) -> dict[str, Any]:
    """status.capacity; empty before a replica has served. A ready replica serves even if its report
    could not be read."""
    shown = now or kept
    if shown is None:
        return {}
    parts = encode(shown.memory.upgraded().parts)
    return {
        **encode(shown),
        "memory": {**encode(shown.memory), "parts": parts},
        "serving": serving,
    }
