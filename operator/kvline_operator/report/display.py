"""What the web page and `kubectl kvline` both show of a status. Pure."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from typing import Any

from kvline_contract.codec import ContractError, decode
from kvline_contract.counts import counted
from kvline_contract.memory import Memory, MemoryV1
from kvline_contract.report import SizingReport
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.capacity_status import RankMemory, ranks
from kvline_operator.store.verdict import Phase

Object = dict[str, Any]
MIB = 1 << 20
Titled = tuple[tuple[str, Memory], ...]
ROLES = ("stable", "candidate", "rejected")


def wanted(spec: Object, status: Object) -> int:
    """Desired replicas: of the autoscaler, else of the spec."""
    return int(status.get("desiredReplicas") or spec.get("replicas", 1))


def memory(status: Object) -> Memory | None:
    """Memory by part in a status; None before a replica has served, or where another writer left
    what is no memory. An operator of an earlier version has written no parts."""
    found = (status.get("capacity") or {}).get("memory")
    with suppress(ContractError):
        return decode(MemoryV1, found, strict=False).upgraded() if found else None
    return None


def memories(status: Object) -> Titled:
    """Memory of each rank under its title, where a status has several; else of the only one,
    without a title."""
    found = rank_memories(status)
    if found:
        binding = status["capacity"].get("bindingRank")
        return tuple((item.title(len(found), binding), item.memory) for item in found)
    one = memory(status)
    return (("", one),) if one is not None else ()


def rank_memories(status: Object) -> tuple[RankMemory, ...]:
    """Of a replica with several ranks; empty where it has one, or another writer left what is no
    memory."""
    given = (status.get("capacity") or {}).get("ranks") or ()
    with suppress(ContractError):
        return tuple(decode(RankMemory, item, strict=False) for item in given)
    return ()


def token_bytes(status: Object) -> str:
    """What a token takes, of a status with a capacity; each of several ranks has a part of it."""
    several = len(rank_memories(status))
    each = f" on each of {several} ranks" if several else ""
    return f"{status['capacity'].get('bytesPerToken', 0):,} bytes a token{each}"


def slots(status: Object) -> str:
    """Slots of recurrent states, of a status with a capacity; empty where no layer keeps one."""
    capacity = status["capacity"]
    if "sequences" not in capacity:
        return ""
    found = (capacity["sequences"], capacity.get("snapshots", 0), capacity.get("slotBytes", 0))
    return slots_text(*found, capacity.get("stateDtype"))


def slots_text(sequences: int, snapshots: int, slot_bytes: int, dtype: str | None) -> str:
    """Such as: 256 sequences at once and 64 snapshots of prefixes, 146.8 MiB each in float32.
    Earlier servers report no dtype."""
    kept = f" and {snapshots:,} snapshots of prefixes" if snapshots else ""
    stored = f" in {dtype}" if dtype else ""
    return f"{sequences:,} sequences at once{kept}, {slot_bytes / MIB:,.1f} MiB each{stored}"


def images(status: Object) -> str:
    """Bounds of images in requests; empty where text alone is served, or nothing is reported."""
    engine = (status.get("effective") or {}).get("engine") or {}
    return images_text(engine.get("maxImagesPerRequest"), engine.get("maxImagePatches"))


def images_text(count: int | None, patches: int | None) -> str:
    """Such as: 8 images a request, of 16,384 patches each at most."""
    if count is None or patches is None:
        return ""
    return f"{counted(count, 'image')} a request, of {patches:,} patches each at most"


def reported(report: SizingReport) -> Titled:
    """The same of a report with a result."""
    result = report.result
    if result is None:
        return ()
    several = ranks(result)
    named = tuple((item.title(len(several), result.binding_rank), item.memory) for item in several)
    return named or (("", result.memory),)


def phase(past: RevisionEntry) -> str:
    """Empty for a revision that was left behind: it would be measured again."""
    left = past.state.verdict is not None or past.state.accepted
    return "" if past.phase is Phase.NEW and left else str(past.phase)


def verdict(past: RevisionEntry) -> str:
    """The gate's last verdict; First for the first revision of a service, which has no gate."""
    if past.state.verdict is not None:
        return past.state.verdict.word
    return "First" if past.state.accepted == 1 else ""


def measured(past: RevisionEntry) -> int:
    """KV tokens in the gate's verdict, else its baseline; 0 where neither is known."""
    return past.state.measured or max(past.state.baseline.values(), default=0)


def elapsed(stamp: str, now: datetime) -> tuple[int, str]:
    """The time since an RFC 3339 stamp, in the largest unit of d, h, m, s that gives 2 or more."""
    seconds = int((now - datetime.fromisoformat(stamp)).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return seconds // size, unit
    return max(0, seconds), "s"


def changes(older: RevisionEntry, newer: RevisionEntry) -> list[str]:
    """Changed fields, as `path: before -> after`."""
    before, after = _flat(older.inputs), _flat(newer.inputs)
    out = [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return out + ([f"image: {newer.image}"] if older.image != newer.image else [])


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {path: value if isinstance(value, str) else json.dumps(value)}
    out: dict[str, str] = {}
    for key, item in value.items():
        out |= _flat(item, f"{path}.{key}" if path else key)
    return out
