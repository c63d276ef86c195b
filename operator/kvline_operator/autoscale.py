"""Plan: how many replicas the load asks for, from validated tokens. Pure.

Demand is counted twice, in KV tokens and in requests, and the larger wins. Replicas are added for
the load that arrives (decision 015), at most `scaleUpPercent` a minute; they are taken away only
when the whole delay asked for fewer, counting all that runs, waits or retries. A replica that does
not report its load is never taken for an idle one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.report import Load
from kvline_operator.spec import Autoscaling

VERSION = 1
MAX_BYTES = 4096
STEP = timedelta(seconds=60)  # the time in which scaleUpPercent is the most
MAX_RISES = 16


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
class Rise:
    """A moment at which replicas were added."""

    at: str = field(limit=32)  # RFC 3339
    before: int


@document
class Scale:
    """What the autoscaler must not forget over a restart, or while no replica answers."""

    version: int
    replicas: int = field(low=1)
    why: str = field(limit=512)
    lower: Lower | None = field(default=None)
    rises: tuple[Rise, ...] = field(items=MAX_RISES, default=())  # of the minute before the last

    @classmethod
    def parse(cls, text: object) -> Scale | None:
        """None for what is missing, or what somebody made unreadable."""
        try:
            found = decode(cls, loads(text, MAX_BYTES), strict=False)  # type: ignore[arg-type]
            for moment in (*(r.at for r in found.rises), *(x.since for x in [found.lower] if x)):
                _moment(moment)
        except (ContractError, TypeError, ValueError):
            return None
        return found if found.version == VERSION else None

    def dumps(self) -> str:
        return dumps(self)


@dataclass(frozen=True, slots=True)
class Demand:
    """What ready replicas say of their load, as replicas."""

    replicas: int  # for all that runs, waits or retries; before bounds
    text: str
    heard: int  # ready replicas that reported it
    silent: int = 0  # and that did not
    arriving: int = 0  # for the load that arrives, never more than `replicas`


@dataclass(frozen=True, slots=True)
class Requests:
    """Of all replicas together, as places in the batch."""

    running: int
    waiting: int
    retrying: int  # distinct clients that were answered 429 and come again
    arriving: float  # what the arriving load takes in the long run

    @property
    def all(self) -> int:
        return self.running + self.waiting + self.retrying

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Requests:
        """Servers that do not tell retries from requests count 400s too: none of theirs."""
        running, waiting = sum(r.running for r in loads), sum(r.waiting for r in loads)
        retrying = sum(r.retrying or 0 for r in loads)
        milli = sum(_milli(r) for r in loads)
        return cls(
            running, waiting, retrying, max(0, min(milli / 1000, running + waiting + retrying))
        )


def _milli(load: Load) -> int:
    if load.arriving_milli is not None:
        return load.arriving_milli
    return 1000 * (load.running + load.waiting + (load.retrying or 0))


def demand(replies: Sequence[Load | None], target_percent: int) -> Demand:
    """Of the ready replicas' loads; None stands for one that could not be read."""
    loads = [r for r in replies if r is not None and r.kv_tokens and r.max_running_requests]
    silent = len(replies) - len(loads)
    if not loads:
        return Demand(0, "", 0, silent)
    tokens, slots = min(r.kv_tokens for r in loads), min(r.max_running_requests for r in loads)
    used, waiting = sum(r.used_tokens for r in loads), sum(r.waiting_prompt_tokens for r in loads)
    requests = Requests.of(loads)
    present = requests.running + requests.waiting

    def replicas(places: float) -> tuple[int, int]:
        """By tokens and by places; who is not here takes as many tokens as who is."""
        size = (used + waiting) * (places / present if present else 1)
        return _share(size, tokens, target_percent), _share(places, slots, target_percent)

    by_tokens, by_slots = replicas(requests.arriving)
    text = (
        f"{used} KV tokens used and {waiting} waiting at {tokens} a replica, {requests.running} "
        f"running, {requests.waiting} waiting and {requests.retrying} rejected requests that "
        f"retry at {slots} a replica: the arriving load takes {math.ceil(requests.arriving)} of "
        f"these places and asks for {by_tokens} by tokens, {by_slots} by places, "
        f"at {target_percent} %"
    )
    return Demand(max(replicas(requests.all)), text, len(loads), silent, max(by_tokens, by_slots))


def _share(amount: float, each: int, percent: int) -> int:
    """ceil(amount / (each * percent / 100)), where a millionth of a place is none."""
    return math.ceil(amount * 100 / (each * percent) - 1e-6)


def decide(
    before: Scale | None, existing: int, asked: Demand, how: Autoscaling, now: datetime
) -> Scale:
    """The next memory; its `replicas` is what to run. `existing` counts where nothing is kept."""
    last = before or Scale(VERSION, max(1, existing), "what there was at the beginning")
    bounded = _clip(last.replicas, how)
    if bounded != last.replicas:
        last = Scale(VERSION, bounded, f"{last.replicas} is out of bounds")
    still = replace(last, lower=None)  # the delay begins anew
    if asked.heard and _clip(asked.arriving, how) > last.replicas:  # silent ones only add to it
        return _rise(still, _clip(asked.arriving, how), asked.text, how, now)
    wanted = _clip(asked.replicas, how)
    if asked.silent or not asked.heard or wanted >= last.replicas:
        return still
    lower = last.lower or Lower(_stamp(now), wanted)
    most = max(lower.most, wanted)
    if now - min(_moment(lower.since), now) < timedelta(seconds=how.scale_down_delay_seconds):
        return replace(last, lower=Lower(lower.since, most))
    return Scale(VERSION, most, asked.text)


def _rise(last: Scale, wanted: int, why: str, how: Autoscaling, now: datetime) -> Scale:
    """As many as wanted, within the step limit from what there was a minute ago."""
    rises = [r for r in last.rises if timedelta(0) <= now - _moment(r.at) < STEP]
    base = rises[0].before if rises else last.replicas
    most = max(base + 1, base * (100 + how.scale_up_percent) // 100)
    if min(wanted, most) <= last.replicas or len(rises) == MAX_RISES:
        return last
    rises.append(Rise(_stamp(now), last.replicas))
    return Scale(VERSION, min(wanted, most), why, None, tuple(rises))


def activity(scale: Scale, asked: Demand, how: Autoscaling, ready: int) -> tuple[Activity, str]:
    """Reason and message of ScalingActive. The message holds no figure that moves by itself."""
    bounds = f"{how.min_replicas} to {how.max_replicas} replicas; spec.replicas is not used"
    if asked.silent or not asked.heard:
        who = f"{asked.silent} ready replicas do not" if asked.silent else "no ready replica can"
        return Activity.UNKNOWN, f"{who} say their load: at least {scale.replicas} stay; {bounds}"
    if asked.arriving > how.max_replicas and scale.replicas == how.max_replicas:
        text = f"the load asks for more than spec.autoscaling.maxReplicas; {bounds}"
        return Activity.AT_MAXIMUM, text
    if ready != scale.replicas:
        return Activity.SCALING, f"to {scale.replicas}: {scale.why}; {bounds}"
    if asked.arriving > scale.replicas:
        text = f"the load asks for more than {scale.replicas}: within a minute, by scaleUpPercent"
        return Activity.SCALING, f"{text}; {bounds}"
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
