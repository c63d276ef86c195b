"""Bounds of the KV budget after a change of the spec, by arithmetic from a measured budget. Pure.

The measured parts of the memory and the bytes of a token are inputs; nothing is measured. A change
whose effect they do not tell has no bound.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from math import ceil, inf, prod
from typing import Any

from kvline_contract.launch import KVCacheDtype, StateDtype
from kvline_contract.memory import (
    ACTIVATIONS,
    CLIENTS,
    ENCODER_CACHE,
    ENCODER_WORK,
    GRAPHS,
    WINDOWS,
)
from kvline_contract.report import Source
from kvline_operator.api.modalities import BOUNDS, Modality
from kvline_operator.api.quantity import canonical, in_bytes
from kvline_operator.api.spec import gpus, ranks
from kvline_operator.observe.slots import Slots
from kvline_operator.plan.revisions import ASKED
from kvline_operator.plan.trade import Asked
from kvline_operator.store.capacity_status import CapacityStatus

Object = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30
MEMORY = "spec.resources.memory"
ROUNDING = 32  # tokens: a budget is whole pages of 16, less one
SHRINKS = 0.95  # what a validation that ran out of memory leaves of a size
SCORES = 16  # rows that are scored at once take at most 1/SCORES of the memory on a CPU
FP8_RATIO = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number, of the dtype and fp8
# What makes pods and not their KV budget.
WITHOUT_EFFECT = {
    "drainSeconds",
    "startupSeconds",
    "imagePullSecrets",
    "serviceAccountName",
    "podMetadata",
    "resources.ephemeralStorage",
    "engine.defaultMaxTokens",
    "engine.toolCallParser",
    *ASKED,
}
# Lowered, they leave memory to the KV cache; raised, they take some.
LIMITS = ("maxModelLen", "maxRunningRequests", "maxPrefillTokens", "maxTopLogprobs")
# By these a server sets how many requests run where windows or states are reserved for them, and
# the spec does not say.
SETS_RUNNING = (
    "resources.memory",
    "capacity.headroomMiB",
    "engine.maxModelLen",
    "engine.maxPrefillTokens",
    "engine.kvCacheDtype",
    "engine.prefixSnapshots",
    "engine.stateDtype",
    "engine.modalities",
    *(f"engine.{field}" for field in BOUNDS),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """KV tokens of a replica; `high` is None where nothing is known above."""

    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one changed field, on what is there for the KV cache."""

    least: float = 0  # bytes more
    most: float = 0
    shrinks: float = 1  # what is left at least of the memory beside weights and KV cache
    ratio: float = 1  # of the bytes of a token, before and after


UNKNOWN = Effect(-inf, inf)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a change of one field would give."""

    field: str
    value: str
    kv_tokens: int
    bound: str = ""  # AtLeast, AtMost; empty: proportional to what was measured


def bounds(measured: CapacityStatus, before: Object, after: Object) -> Bounds:
    """The budget of a revision with inputs `after`, from one that was measured with `before`. The
    same image and the same kind of node are assumed."""
    changed = _changed(before, after)
    pinned = (after.get("capacity") or {}).get("kvTokens")
    changed.pop("capacity.kvTokens", None)
    if _has_fixed_cost(measured) and any(_sets_running(path, before, after) for path in changed):
        effects = [UNKNOWN]
    else:
        effects = [
            _effect(path, old, new, measured, before, after) for path, (old, new) in changed.items()
        ]
    found = _with(measured, effects)
    if pinned is None:
        return found
    survives = found.low >= pinned
    return Bounds(pinned if survives else 0, pinned)


def _with(measured: CapacityStatus, effects: list[Effect]) -> Bounds:
    tokens, each = measured.kv_tokens, measured.bytes_per_token
    # What clients may hold grows with the KV cache on a CPU: by an unknown part of this.
    beside = _bytes(measured, CLIENTS) / tokens
    beside_kv = _bytes(measured, ACTIVATIONS, GRAPHS, CLIENTS, WINDOWS)
    freed = (1 - prod(e.shrinks for e in effects)) * beside_kv
    ratio = prod(e.ratio for e in effects)
    least, most = sum(e.least for e in effects), sum(e.most for e in effects) + freed

    def at(start: float, gained: float, extra: float) -> float:
        return (start * (each + extra) + gained) / (each / ratio + extra)

    low = min(at(tokens, least, extra) for extra in (0, beside))
    low = max(0, low - ROUNDING * (low != tokens))
    start = _largest(measured)
    if start is None or most == inf:
        return Bounds(int(low), None)
    high = max(at(start, most, extra) for extra in (0, beside))
    return Bounds(int(low), max(0, ceil(high)))


def _largest(measured: CapacityStatus) -> float | None:
    """The most that the same memory may hold: beside rounding, each attempt has shrunk the size. A
    recorded size does not tell its attempts; None for a pinned one."""
    if measured.source is Source.PINNED:
        return None
    shrunk = 1 if measured.source is Source.RECORDED else measured.attempts - 1
    return (measured.kv_tokens + ROUNDING) / SHRINKS**shrunk


# Of a model with recurrent states, what changes those behind draft tokens too: no status has them.
WITH_DRAFT_STATES = frozenset({"engine.maxRunningRequests", "engine.stateDtype"})


def _effect(
    path: str, old: Any, new: Any, measured: CapacityStatus, before: Object, after: Object
) -> Effect:
    section, _, field = path.partition(".")
    resources = before.get("resources") or {}
    if path in WITHOUT_EFFECT:
        return Effect()
    drafting = any((each.get("engine") or {}).get("speculation") for each in (before, after))
    if drafting and measured.slots is not None and path in WITH_DRAFT_STATES:
        return UNKNOWN
    if path == "engine.maxRunningRequests" and old is None:
        old = measured.sequences  # the server's default, where slots are reserved for them
    if path == "engine.prefixSnapshots" and measured.snapshots is not None:
        return _of_snapshots(measured.snapshots if old is None else old, new, measured)
    if path == "resources.memory":
        return _of_memory(old, new, measured, resources)
    if path == "capacity.headroomMiB" and None not in (old, new):
        return Effect((old - new) * MIB, (old - new) * MIB)
    if path == "engine.kvCacheDtype":
        wider = (old or KVCacheDtype.AUTO) == KVCacheDtype.AUTO and new == KVCacheDtype.FP8
        known = FP8_RATIO.get(measured.cache_dtype or "")
        # What a step takes beside it may grow: numbers are read in the model's own dtype.
        if not (wider and known):
            return UNKNOWN
        return Effect(-inf, (1 - 1 / known) * _bytes(measured, WINDOWS), ratio=known)
    if path == "engine.stateDtype" and measured.slots is not None:
        slots = Asked.of(after).expected(measured.slots)
        return _of_state_dtype(old, new, slots, measured.bfloat16_slot_bytes)
    if path == "engine.modalities":
        return _of_modalities(new, measured)
    if field in BOUNDS and (after.get("engine") or {}).get("modalities") == [Modality.TEXT]:
        return Effect()  # they go with the images
    if section == "engine" and field in BOUNDS and None not in (old, new):
        # By how much its step, its rows and what clients may send change, only a measurement tells.
        changes = _bytes(measured, ENCODER_WORK, ENCODER_CACHE, CLIENTS, ACTIVATIONS, GRAPHS)
        return Effect(0, changes) if new < old else Effect(-inf, 0)
    if section == "engine" and field in LIMITS and None not in (old, new):
        asked = (before.get("engine") or {}).get("prefixSnapshots")
        # The server's default may follow how many requests run.
        follows = 0 if asked is not None else measured.snapshots or 0
        found = _of_limit(field, old, new, measured, follows)
        return found if new > old else _with_encoder(found, field, measured, after)
    return UNKNOWN


def _of_limit(field: str, old: int, new: int, measured: CapacityStatus, snapshots: int) -> Effect:
    """`snapshots`: those that may become fewer with the requests."""
    length, requests = field == "maxModelLen", field == "maxRunningRequests"
    slots = _slots(old - new, measured) if requests else 0
    if new > old:
        # A context that the window hid nothing of may become longer than it.
        kept = length and measured.full_bytes_per_token is not None and not _frees_windows(measured)
        return UNKNOWN if kept else Effect(-inf, slots)
    shrinks = new / max(1, old)
    if length and _frees_windows(measured):
        # Or no longer than the window: then all layers keep all, and none has windows beside.
        return Effect(-inf, _bytes(measured, WINDOWS), shrinks)
    # One sequence alone shares its pages with none, so nothing is kept for that.
    alone = _bytes(measured, CLIENTS) if requests and new == 1 else 0
    fewer = _slots(snapshots, measured) if requests else 0
    return Effect(slots, slots + fewer + alone, shrinks)


def _of_snapshots(old: int, new: int | None, measured: CapacityStatus) -> Effect:
    if new is None:  # the server's default, which nothing here tells
        return UNKNOWN
    more = _slots(old - new, measured)
    return Effect(more, more)


def _of_state_dtype(old: Any, new: Any, slots: Slots, small: int | None) -> Effect:
    """Of the slots that are asked for, whose number is another field's effect. `small`: bytes of
    one in bfloat16. On a CPU a step takes a part of what they leave, for states in float32."""
    if (old or StateDtype.FLOAT32) == (new or StateDtype.FLOAT32):
        return Effect()
    if new != StateDtype.BFLOAT16 or small is None:
        return UNKNOWN
    count = 1 + slots.sequences + slots.snapshots  # with that of padding
    return Effect(0, count * (slots.slot_bytes - small))


def _with_encoder(lowered: Effect, field: str, measured: CapacityStatus, after: Object) -> Effect:
    """By the context and the tokens of a step a server bounds images, and with them the encoder's
    step and cache. One that the spec bounds may not fit a shorter context, so that none starts."""
    if field not in ("maxModelLen", "maxPrefillTokens"):
        return lowered
    most = lowered.most + _bytes(measured, ENCODER_WORK, ENCODER_CACHE)
    bounded = field == "maxModelLen" and "maxImagePatches" in after["engine"]
    unsure = bounded and measured.memory.upgraded().encoder()
    return replace(lowered, least=-inf if unsure else lowered.least, most=most)


def _of_modalities(new: list[str] | None, measured: CapacityStatus) -> Effect:
    """Text alone leaves the encoder's memory: as its parts are, in whole MiB each, and at most
    what steps and clients take for images besides."""
    parts = measured.memory.upgraded().encoder()
    if new is None or (Modality.IMAGE in new) == bool(parts):
        return Effect()
    if Modality.IMAGE in new:
        return UNKNOWN
    least = sum(parts.values()) - len(parts)
    besides = _bytes(measured, CLIENTS, ACTIVATIONS, GRAPHS)
    return Effect(least * MIB, (least + 2 * len(parts)) * MIB + besides)


def _slots(fewer: int, measured: CapacityStatus) -> int:
    """Bytes that so many slots of recurrent states leave."""
    return fewer * (measured.slot_bytes or 0)


def as_many_run(before: Object, after: Object) -> bool:
    """Whether the server's choice of how many requests run stays, of a model that has a fixed cost
    for each of them; also where the spec says."""
    changed = _changed(before, after)
    chosen = "engine.maxRunningRequests" in changed and _running(after) is None
    return not chosen and not any(_sets_running(path, before, after) for path in changed)


def _running(inputs: Object) -> Any:
    """As the spec has it; None: the server chooses."""
    return (inputs.get("engine") or {}).get("maxRunningRequests")


def _sets_running(path: str, before: Object, after: Object) -> bool:
    """Whether by this another number of requests may run, and so other windows and states be
    reserved."""
    of_host = path == "resources.memory" and gpus(before.get("resources") or {})
    return _running(after) is None and path in SETS_RUNNING and not of_host


def _has_fixed_cost(measured: CapacityStatus) -> bool:
    """Whether something is reserved for each request that may run."""
    return _frees_windows(measured) or measured.sequences is not None


def _frees_windows(measured: CapacityStatus) -> bool:
    """Whether some layers keep windows beside the KV cache of the others."""
    full = measured.full_bytes_per_token
    return full is not None and full != measured.bytes_per_token


def _of_memory(old: str, new: str, measured: CapacityStatus, resources: Object) -> Effect:
    """On a CPU each rank has its share. More memory lets more rows be scored at once, which takes
    at most a share of it, and, as rows come in blocks, as much as a step takes now."""
    more = (in_bytes(new, MEMORY) - in_bytes(old, MEMORY)) / ranks(resources)
    if gpus(resources):  # the host's, which has no part of the KV cache
        return Effect() if more > 0 else Effect(least=-inf)
    scores = abs(more) / SCORES + _bytes(measured, ACTIVATIONS)
    return Effect(more - scores, more) if more > 0 else Effect(more, more + scores)


def estimates(
    measured: CapacityStatus, inputs: Object, running: int | None
) -> tuple[Estimate, ...]:
    """What 1 GiB more, an fp8 cache, half the requests or snapshots, states in bfloat16 and text
    alone would give each replica, where that can be computed. `running`: requests that run at
    once, with the default resolved."""
    out: list[Estimate] = []
    if measured.source is Source.PINNED:
        return ()
    resources = inputs.get("resources") or {}
    if "memory" in resources and not gpus(resources):
        mib = (in_bytes(resources["memory"], MEMORY) + GIB) // MIB
        more = canonical(f"{mib}Mi", MEMORY)
        low = bounds(measured, inputs, _with_field(inputs, "resources", "memory", more)).low
        if low > measured.kv_tokens:
            out.append(Estimate(MEMORY, more, low, "AtLeast"))
    if ratio := FP8_RATIO.get(measured.cache_dtype or ""):
        most = bounds(measured, inputs, _with_field(inputs, "engine", "kvCacheDtype", "fp8")).high
        exact = not _bytes(measured, CLIENTS, WINDOWS)
        tokens = measured.kv_tokens * ratio if exact else most or 0
        bound = "" if exact else "AtMost"
        if most is not None:
            out.append(Estimate("spec.engine.kvCacheDtype", "fp8", tokens, bound))
    if running and running > 1:
        now = _with_field(inputs, "engine", "maxRunningRequests", running)
        half = _with_field(inputs, "engine", "maxRunningRequests", running // 2)
        most = bounds(measured, now, half).high or 0
        out.append(Estimate("spec.engine.maxRunningRequests", str(running // 2), most, "AtMost"))
    fewer = (measured.snapshots or 0) // 2
    changed = _with_field(inputs, "engine", "prefixSnapshots", fewer)
    tokens = bounds(measured, inputs, changed).low
    if fewer and tokens > measured.kv_tokens:
        out.append(Estimate("spec.engine.prefixSnapshots", str(fewer), tokens, "AtLeast"))
    if measured.bfloat16_slot_bytes is not None:
        value = str(StateDtype.BFLOAT16)
        most = bounds(measured, inputs, _with_field(inputs, "engine", "stateDtype", value)).high
        if most is not None:
            out.append(Estimate("spec.engine.stateDtype", value, most, "AtMost"))
    if measured.memory.upgraded().encoder():
        text = _with_field(inputs, "engine", "modalities", [str(Modality.TEXT)])
        tokens = bounds(measured, inputs, text).low
        if tokens > measured.kv_tokens:
            out.append(Estimate("spec.engine.modalities", str(Modality.TEXT), tokens, "AtLeast"))
    return tuple(out)


def tokens_per_gib(measured: CapacityStatus) -> int:
    """KV tokens in 1 GiB of KV cache, on each rank."""
    return GIB // max(1, measured.bytes_per_token)


def _with_field(inputs: Object, section: str, field: str, value: Any) -> Object:
    out = copy.deepcopy(inputs)
    out[section] = {**(out.get(section) or {}), field: value}
    return out


def _changed(before: Object, after: Object) -> dict[str, tuple[Any, Any]]:
    """Changed fields by path, of two levels in those that are settings."""
    old, new = _flat(before), _flat(after)
    paths = sorted(old.keys() | new.keys())
    return {p: (old.get(p), new.get(p)) for p in paths if old.get(p) != new.get(p)}


def _flat(inputs: Object) -> Object:
    out: Object = {}
    for key, value in inputs.items():
        if key in ("engine", "resources", "capacity"):
            out |= {f"{key}.{field}": item for field, item in value.items()}
        else:
            out[key] = json.dumps(value, sort_keys=True)
    return out


def _bytes(measured: CapacityStatus, *parts: str) -> int:
    memory = measured.memory.upgraded()
    return sum(memory.mib(part) for part in parts) * MIB
