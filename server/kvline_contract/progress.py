"""How texts say what a start does: its stage, since when, and how long the rest may take. Pure.

The condition has the headline, which changes with the stage alone; seconds are for logs and pages.
"""

from __future__ import annotations

from datetime import UTC, datetime

from kvline_contract import times
from kvline_contract.report import Current, SizingReport

MIB = 1 << 20
WAITS_FOR_HTTP = "waits for HTTP"  # the name of a step


def headline(current: Current) -> str:
    return f"stage {current.stage} of {current.stages}: {current.what}, since {current.since}"


def line(report: SizingReport, now: datetime) -> str:
    """Of a start at a moment; empty where it has ended, or its server does not report it."""
    current = report.current
    if current is None:
        return ""
    text = f"stage {current.stage} of {current.stages}: {current.what}"
    details = [_step(current), _loaded(report), _seconds(current, now), _rest(report, now)]
    return ", ".join([text, *filter(None, details)])


def _step(current: Current) -> str:
    if current.step is None or current.steps is None:
        return current.name or ""
    text = f"step {current.step} of {current.steps}"
    return f"{text} ({current.name})" if current.name else text


def _loaded(report: SizingReport) -> str:
    for stage in report.stages:
        if stage.total_bytes:
            return f"{stage.bytes // MIB:,} of {stage.total_bytes // MIB:,} MiB"
    return ""


def _seconds(current: Current, now: datetime) -> str:
    since = _moment(current.since)
    return f"{max(0, round((now - since).total_seconds()))} s so far" if since else ""


def _rest(report: SizingReport, now: datetime) -> str:
    """By what the server expects, or by the rate of a load that goes on."""
    assert report.current is not None
    ready = _moment(report.current.ready_at or "")
    if ready is not None:
        left = round((ready - now).total_seconds())
        return f"about {left} s left" if left > 0 else f"expected to be ready {-left} s ago"
    for stage in report.stages:
        if stage.total_bytes and stage.bytes > 0:
            left = round(stage.ms * (stage.total_bytes - stage.bytes) / stage.bytes / 1000)
            return f"about {max(0, left)} s left of this stage"
    return "the rest is not known yet"


def ready_at(now: datetime, seconds: float) -> str:
    return times.stamp(datetime.fromtimestamp(now.timestamp() + seconds, UTC))


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
