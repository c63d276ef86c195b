"""Writing the autoscaler's number into spec.replicas, as an HPA does, and who else writes it. Pure.

The field is what holds once spec.autoscaling is removed; until then it has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from kvline_contract.names import AUTOSCALER
from kvline_contract.times import stamp
from kvline_operator.api.replicas_field import ReplicasField
from kvline_operator.plan.autoscale import Scale, SecondWriter, moment

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MAX_OVERWRITES = 3  # of another manager's number, within a day


def observe_writers(
    after: Scale, before: Scale | None, seen: ReplicasField, now: datetime
) -> Scale:
    """With what managedFields tell of spec.replicas: a write by another manager takes it from the
    autoscaler, once it was the autoscaler's."""
    own, second = (before.own, before.second) if before is not None else (False, None)
    if second is not None and now - moment(second.at) >= DAY:
        second = None
    if AUTOSCALER in seen.managers:
        own = True
    elif own:
        own = False
        if seen.managers:  # else it was removed, and has the schema's default
            times = 1 + (second.times if second is not None else 0)
            second = SecondWriter(", ".join(seen.managers)[:256], times, stamp(now))
    return replace(after, own=own, second=second)


def replicas_to_write(scale: Scale, seen: ReplicasField) -> int | None:
    """The number for spec.replicas, which holds when autoscaling is removed; None where it is right
    or left to another writer, after MAX_OVERWRITES within a day."""
    given_up = scale.second is not None and scale.second.times > MAX_OVERWRITES
    return None if given_up or seen.value == scale.replicas else scale.replicas


def second_writer(scale: Scale, now: datetime) -> str:
    """For the message of ScalingActive; empty where nobody else has written for an hour."""
    second = scale.second
    if second is None:
        return ""
    given_up = second.times > MAX_OVERWRITES
    if not given_up and now - moment(second.at) >= HOUR:
        return ""
    outcome = "is left to it for a day, without effect" if given_up else "was set back"
    return (
        f"{second.managers} writes spec.replicas too, which {outcome}: make it leave the field "
        "alone, or remove spec.autoscaling"
    )
