"""How many replicas the load needs, from validated KV tokens. Pure.

Demand is computed in KV tokens and in requests; the larger counts. Replicas are added for the
arriving load (decision 015), at most `scaleUpPercent` in a minute. They are removed only after
fewer were enough for all of scaleDownDelaySeconds, counting running, waiting and retrying requests.
A replica that does not report its load never counts as idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.counts import counted
from kvline_contract.load import Load
from kvline_contract.times import stamp
from kvline_operator.api.spec import Autoscaling

VERSION = 1
MAX_BYTES = 4096
STEP = timedelta(seconds=60)  # the time for which scaleUpPercent is the limit
MAX_RISES = 16


class Activity(StrEnum):
    """Reasons of ScalingActive."""

    SCALING = "Scaling"
    STABLE = "Stable"
    UNKNOWN = "DemandUnknown"
    AT_MAXIMUM = "AtMaximum"
    FOREIGN_CHANGE = "ForeignChange"


@dataclass(frozen=True, slots=True)
class Scaling:
    """The autoscaler's decision, for the status."""

    reason: Activity
    message: str
    replicas: int
    why: str  # why the last change was made


@document
class ScaleDownWindow:
    """A period in which fewer replicas were enough."""

    since: str = field(limit=32)  # RFC 3339
    most: int  # the largest demand within it


@document
class ScaleUp:
    """A scale-up, with the replicas before it."""

    at: str = field(limit=32)  # RFC 3339
    before: int


@document
class ScaleUpWindow:
    """A period in which more replicas were needed while others were starting."""

    since: str = field(limit=32)  # RFC 3339
    least: int  # the smallest demand within it


@document
class SecondWriter:
    """Who else writes spec.replicas while the autoscaler does."""

    managers: str = field(limit=256)
    times: int  # within a day
    at: str = field(limit=32)  # RFC 3339; the last time


@document
class Scale:
    """The state of the autoscaler, stored in a ConfigMap."""

    version: int
    replicas: int = field(low=1)
    why: str = field(limit=512)
    lower: ScaleDownWindow | None = field(default=None)
    rises: tuple[ScaleUp, ...] = field(items=MAX_RISES, default=())  # within STEP
    higher: ScaleUpWindow | None = field(default=None)
    own: bool = field(default=False)  # the autoscaler was a manager of spec.replicas when last read
    second: SecondWriter | None = field(default=None)

    @classmethod
    def parse(cls, text: object) -> Scale | None:
        """None where it is missing or unreadable."""
        try:
            found = decode(cls, loads(text, MAX_BYTES), strict=False)  # type: ignore[arg-type]
            windows = [w for w in (found.lower, found.higher) if w is not None]
            times = [*(r.at for r in found.rises), *(w.since for w in windows)]
            for time in times + ([found.second.at] if found.second is not None else []):
                moment(time)
        except (ContractError, TypeError, ValueError):
            return None
        return found if found.version == VERSION else None

    def dumps(self) -> str:
        return dumps(self)


@dataclass(frozen=True, slots=True)
class Demand:
    """Replicas that the load needs, before minReplicas and maxReplicas."""

    replicas: int  # for all running, waiting and retrying requests
    text: str
    reporting: int  # ready replicas that reported their load
    not_reporting: int = 0  # ready replicas that did not
    arriving: int = 0  # for the arriving load; never more than `replicas`


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of all replicas, in slots of a batch (maxRunningRequests)."""

    running: int
    waiting: int
    retrying: int  # distinct requests that were answered 429 and are retried
    arriving: float  # slots that the arriving load takes on average

    @property
    def all(self) -> int:
        return self.running + self.waiting + self.retrying

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Requests:
        """Rejections of servers without `retrying` do not count: they include 400s."""
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
    """From the loads of ready replicas; None for one that could not be read."""
    loads = [r for r in replies if r is not None and r.kv_tokens and r.max_running_requests]
    not_reporting = len(replies) - len(loads)
    if not loads:
        return Demand(0, "", 0, not_reporting)
    tokens, slots = min(r.kv_tokens for r in loads), min(r.max_running_requests for r in loads)
    used, waiting = sum(r.used_tokens for r in loads), sum(r.waiting_prompt_tokens for r in loads)
    requests = Requests.of(loads)
    present = requests.running + requests.waiting

    def replicas(taken: float) -> tuple[int, int]:
        """By tokens and by slots; each request counts with the mean tokens of those present."""
        size = (used + waiting) * (taken / present if present else 1)
        return _share(size, tokens, target_percent), _share(taken, slots, target_percent)

    by_tokens, by_slots = replicas(requests.arriving)
    text = (
        f"{used} KV tokens used and {waiting} waiting at {tokens} a replica, {requests.running} "
        f"running, {requests.waiting} waiting and {requests.retrying} rejected requests that "
        f"retry at {slots} a replica: the arriving load takes {math.ceil(requests.arriving)} of "
        f"these slots and needs {counted(by_tokens, 'replica')} by tokens, {by_slots} by slots, "
        f"at {target_percent} %"
    )
    return Demand(
        max(replicas(requests.all)), text, len(loads), not_reporting, max(by_tokens, by_slots)
    )


def _share(amount: float, each: int, percent: int) -> int:
    """ceil(amount / (each * percent / 100)), ignoring rounding errors."""
    return math.ceil(amount * 100 / (each * percent) - 1e-6)


def decide(
    before: Scale | None,
    existing: int,
    demand: Demand,
    policy: Autoscaling,
    now: datetime,
    settled: int | None = None,
) -> Scale:
    """The next state with the desired replicas; without a state it starts from `existing`.
    `settled` replicas have been ready for a minute; None: all."""
    last = before or Scale(VERSION, max(1, existing), "the replicas at the start")
    bounded = _clip(last.replicas, policy)
    if bounded != last.replicas:
        last = Scale(VERSION, bounded, f"{last.replicas} is out of bounds")
    arriving, window = _clip(demand.arriving, policy), None
    if settled is not None and settled < last.replicas and demand.reporting:
        window, arriving = _waits(last, arriving, now)
    last = replace(last, higher=window)
    still = replace(last, lower=None)  # the delay starts again
    if demand.reporting and arriving > last.replicas:  # replicas that do not report only add to it
        return _scale_up(still, arriving, demand.text, policy, now)
    wanted = _clip(demand.replicas, policy)
    if demand.not_reporting or not demand.reporting or wanted >= last.replicas:
        return still
    lower = last.lower or ScaleDownWindow(stamp(now), wanted)
    most = max(lower.most, wanted)
    if now - min(moment(lower.since), now) < timedelta(seconds=policy.scale_down_delay_seconds):
        return replace(last, lower=ScaleDownWindow(lower.since, most))
    return Scale(VERSION, most, demand.text)


def _waits(last: Scale, wanted: int, now: datetime) -> tuple[ScaleUpWindow | None, int]:
    """The window while replicas start, and what it asks for once it has lasted a minute. Rejected
    clients move to a replica that gets ready, which takes them for new ones, and of many estimates
    one is far too high: so the smallest of a minute counts."""
    if wanted <= last.replicas:
        return None, last.replicas
    window = last.higher or ScaleUpWindow(stamp(now), wanted)
    window = ScaleUpWindow(window.since, min(window.least, wanted))
    lasted = now - min(moment(window.since), now) >= STEP
    return window, window.least if lasted else last.replicas


def _scale_up(last: Scale, wanted: int, why: str, policy: Autoscaling, now: datetime) -> Scale:
    """Scales up, limited to scaleUpPercent of the replicas of a minute ago."""
    rises = [r for r in last.rises if timedelta(0) <= now - moment(r.at) < STEP]
    base = rises[0].before if rises else last.replicas
    most = max(base + 1, base * (100 + policy.scale_up_percent) // 100)
    if min(wanted, most) <= last.replicas or len(rises) == MAX_RISES:
        return last
    rises.append(ScaleUp(stamp(now), last.replicas))
    return Scale(VERSION, min(wanted, most), why, None, tuple(rises))


def activity(
    scale: Scale, demand: Demand, policy: Autoscaling, ready: int, second: str = ""
) -> tuple[Activity, str]:
    """Reason and message of ScalingActive; the message has no figures of the current load, which
    would change the status with every poll. `second` tells of another writer of spec.replicas."""
    reason, text = _activity(scale, demand, policy, ready)
    if not second:
        return reason, text
    known = reason is not Activity.UNKNOWN
    return Activity.FOREIGN_CHANGE if known else reason, f"{second}; {text}"


def _activity(
    scale: Scale, demand: Demand, policy: Autoscaling, ready: int
) -> tuple[Activity, str]:
    least, most = policy.min_replicas, policy.max_replicas
    bounds = f"spec.replicas follows the load between {least} and {most}"
    if demand.not_reporting or not demand.reporting:
        text = "no ready replica can report load"
        if demand.not_reporting:
            text = f"{counted(demand.not_reporting, 'ready replica')} without a report of load"
        return Activity.UNKNOWN, f"{text}: {scale.replicas} or more are kept; {bounds}"
    if demand.arriving > policy.max_replicas and scale.replicas == policy.max_replicas:
        text = f"the load needs more than spec.autoscaling.maxReplicas; {bounds}"
        return Activity.AT_MAXIMUM, text
    if ready != scale.replicas:
        return Activity.SCALING, f"to {scale.replicas}: {scale.why}; {bounds}"
    if demand.arriving > scale.replicas:
        text = f"the load needs more than {scale.replicas}; limited by scaleUpPercent for a minute"
        return Activity.SCALING, f"{text}; {bounds}"
    return Activity.STABLE, f"{counted(scale.replicas, 'replica')}; {bounds}"


def _clip(replicas: int, policy: Autoscaling) -> int:
    return min(max(replicas, policy.min_replicas), policy.max_replicas)


def moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a time without a time zone")
    return found
