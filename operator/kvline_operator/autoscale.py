"""Plan: how many replicas the load asks for, from proven tokens. Pure.

Demand is counted twice, in KV tokens and in requests, and the larger wins; product section 3,
«Scale». More replicas come at once, fewer only when the whole delay asked for fewer, and a replica
that does not say its load is never taken for an idle one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.report import Load
from kvline_operator.spec import Autoscaling

VERSION = 1
MAX_BYTES = 4096


class Activity(StrEnum):
    """Reasons of ScalingActive."""

    SCALING = "Scaling"
    STABLE = "Stable"
    UNKNOWN = "DemandUnknown"
    AT_MAXIMUM = "AtMaximum"


@document
class Lower:
    """A time in which fewer replicas were enough."""

    since: str = field(limit=32)  # RFC 3339
    most: int  # replicas that it asked for at its peak


@document
class Scale:
    """What the autoscaler must not forget over a restart, or while no replica answers."""

    version: int
    replicas: int = field(low=1)
    why: str = field(limit=512)
    lower: Lower | None = field(default=None)

    @classmethod
    def parse(cls, text: object) -> Scale | None:
        """None for what is missing, or what somebody made unreadable."""
        try:
            found = decode(cls, loads(text, MAX_BYTES), strict=False)  # type: ignore[arg-type]
            if found.lower is not None:
                _moment(found.lower.since)
        except (ContractError, TypeError, ValueError):
            return None
        return found if found.version == VERSION else None

    def dumps(self) -> str:
        return dumps(self)


@dataclass(frozen=True, slots=True)
class Demand:
    """What ready replicas say of their load, as replicas."""

    replicas: int  # before bounds
    text: str
    heard: int  # ready replicas that said it
    silent: int = 0  # and that did not


def demand(replies: Sequence[Load | None], target_percent: int) -> Demand:
    """Of the ready replicas' loads; None stands for one that could not be read."""
    said = [r for r in replies if r is not None and r.kv_tokens and r.max_running_requests]
    silent = len(replies) - len(said)
    if not said:
        return Demand(0, "", 0, silent)
    tokens, slots = min(r.kv_tokens for r in said), min(r.max_running_requests for r in said)
    used, waiting = sum(r.used_tokens for r in said), sum(r.waiting_prompt_tokens for r in said)
    running, queued = sum(r.running for r in said), sum(r.waiting for r in said)
    refused = sum(r.refused_last60s for r in said)
    by_tokens = _share(used + waiting, tokens, target_percent)
    by_slots = _share(running + queued + refused, slots, target_percent)
    text = (
        f"{used} KV tokens used and {waiting} waiting at {tokens} a replica ask for {by_tokens}, "
        f"{running} running, {queued} waiting and {refused} refused requests at {slots} a replica "
        f"ask for {by_slots}, at {target_percent} %"
    )
    return Demand(max(by_tokens, by_slots), text, len(said), silent)


def _share(amount: int, each: int, percent: int) -> int:
    """ceil(amount / (each * percent / 100)) in integers."""
    return -(-amount * 100 // (each * percent))


def decide(
    before: Scale | None, existing: int, asked: Demand, how: Autoscaling, now: datetime
) -> Scale:
    """The next memory; its `replicas` is what to run. `existing` counts where nothing is kept."""
    last = before or Scale(VERSION, max(1, existing), "what there was at the beginning")
    bounded = _clip(last.replicas, how)
    if bounded != last.replicas:
        last = Scale(VERSION, bounded, f"{last.replicas} is out of bounds")
    wanted = _clip(asked.replicas, how)
    if asked.heard and wanted > last.replicas:  # silent ones could only add to it
        return Scale(VERSION, wanted, asked.text)
    if asked.silent or not asked.heard or wanted == last.replicas:
        return Scale(VERSION, last.replicas, last.why)  # the delay begins anew
    lower = last.lower or Lower(_stamp(now), wanted)
    most = max(lower.most, wanted)
    if now - min(_moment(lower.since), now) < timedelta(seconds=how.scale_down_delay_seconds):
        return Scale(VERSION, last.replicas, last.why, Lower(lower.since, most))
    return Scale(VERSION, most, asked.text)


def activity(scale: Scale, asked: Demand, how: Autoscaling, ready: int) -> tuple[Activity, str]:
    """Reason and message of ScalingActive. The message holds no figure that moves by itself."""
    bounds = f"{how.min_replicas} to {how.max_replicas} replicas; spec.replicas is not used"
    if asked.silent or not asked.heard:
        who = f"{asked.silent} ready replicas do not" if asked.silent else "no ready replica can"
        return Activity.UNKNOWN, f"{who} say their load: at least {scale.replicas} stay; {bounds}"
    if asked.replicas > how.max_replicas:
        text = f"the load asks for more than spec.autoscaling.maxReplicas; {bounds}"
        return Activity.AT_MAXIMUM, text
    if ready != scale.replicas:
        return Activity.SCALING, f"to {scale.replicas}: {scale.why}; {bounds}"
    return Activity.STABLE, f"{scale.replicas} replicas; {bounds}"


def _clip(replicas: int, how: Autoscaling) -> int:
    return min(max(replicas, how.min_replicas), how.max_replicas)


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a time without its zone")
    return found


def _stamp(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
