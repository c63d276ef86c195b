"""The view model of the page: what the templates show of a service. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvline_contract.memory import Memory
from kvline_contract.progress import line as line_of_start
from kvline_contract.report import SizingReport
from kvline_operator.observe.pods import PodView, condition_of
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report.advice import NOTHING, advise
from kvline_operator.report.display import (
    changes,
    elapsed,
    images,
    measured,
    memories,
    memory,
    phase,
    slots,
    token_bytes,
    verdict,
    wanted,
)
from kvline_operator.report.estimates import Shown, per_gib, rows
from kvline_operator.report.kstatus import plain
from kvline_operator.report.status import replica_state
from kvline_operator.report.status_cache import RevisionEntry, View

Object = dict[str, Any]
# Width of a full bar, in SVG units.
WIDTH = 1000


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar or a part of one: its start and width, in units of WIDTH."""

    name: str
    x: int
    width: int
    text: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A service in the list."""

    namespace: str
    name: str
    state: str  # good, busy, bad
    reason: str
    ready: int
    wanted: int
    tokens: int
    total: int
    memory: tuple[Bar, ...]
    revision: str
    note: str  # reason of a rollout or the autoscaler that needs attention


@dataclass(frozen=True, slots=True)
class Totals:
    services: int
    serving: int
    replicas: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """A condition, with the advice for it."""

    type: str
    state: str
    reason: str
    message: str
    do: str


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    node: str
    state: str
    level: str
    tokens: int
    share: int  # of the largest replica's tokens, in units of WIDTH
    revision: str
    doing: str  # of a start, with its seconds and expected rest
    attempts: tuple[str, ...]
    stages: tuple[Bar, ...]
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    revision: str
    result: str
    level: str
    message: str
    measured: Bar | None
    required: Bar | None
    baseline: Bar | None


@dataclass(frozen=True, slots=True)
class Row:
    """A revision in the history."""

    name: str
    phase: str
    age: str
    verdict: str
    measured: int
    required: int
    changed: tuple[str, ...]
    image: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Memory of one rank."""

    title: str  # empty where there is one rank
    memory: tuple[Bar, ...]
    total_mib: int


@dataclass(frozen=True, slots=True)
class Service:
    line: Line
    message: str
    url: str
    source: str
    capacity: Object
    ranks: tuple[Waterfall, ...]
    token_bytes: str
    slots: str
    images: str
    per_gib: str
    estimates: tuple[Shown, ...]
    conditions: tuple[ConditionRow, ...]
    replicas: tuple[Replica, ...]
    gate: Gate | None
    history: tuple[Row, ...]


def line(view: View) -> Line:
    status = view.status
    ready, rollout = condition_of(status, "Ready"), status.get("rollout") or {}
    capacity = status.get("capacity") or {}
    return Line(
        namespace=view.key.namespace,
        name=view.key.name,
        state=_level(ready),
        reason=ready.get("reason", "New"),
        ready=status.get("readyReplicas", 0),
        wanted=wanted(view.spec, status),
        tokens=capacity.get("kvTokens", 0),
        total=capacity.get("kvTokensTotal", 0),
        memory=waterfall(memory(status)),
        revision=rollout.get("stableRevision", ""),
        note=_note(status),
    )


def _note(status: Object) -> str:
    for kind in ("UpToDate", "ScalingActive", "CapacityStable"):
        condition = condition_of(status, kind)
        if condition.get("status") == "False" and condition["reason"] != "Pending":
            return str(condition["reason"])
    return ""


def totals(views: list[View]) -> Totals:
    lines = [line(view) for view in views]
    serving = [item for item in lines if item.state == "good"]
    return Totals(
        services=len(lines),
        serving=len(serving),
        replicas=sum(item.ready for item in lines),
        tokens=sum(item.total for item in lines),
    )


def service(view: View, now: datetime) -> Service:
    status = view.status
    capacity = status.get("capacity") or {}
    return Service(
        line=line(view),
        message=condition_of(status, "Ready").get("message", ""),
        url=status.get("url", ""),
        source=(view.spec.get("model") or {}).get("source", ""),
        capacity=capacity,
        ranks=tuple(
            Waterfall(title, waterfall(found), found.total_mib) for title, found in memories(status)
        ),
        token_bytes=token_bytes(status) if capacity else "",
        slots=slots(status) if capacity else "",
        images=images(status),
        per_gib=per_gib(status),
        estimates=rows(status),
        conditions=tuple(_condition_row(c) for c in plain(status)),
        replicas=replicas(view, now),
        gate=gate((status.get("rollout") or {}).get("gate")),
        history=history(view.history, now),
    )


def waterfall(device: Memory | None) -> tuple[Bar, ...]:
    """Parts of the memory as consecutive bars."""
    if device is None:
        return ()
    total, at, out = max(1, device.total_mib), 0, []
    for part in device.parts:
        start, at = round(at * WIDTH / total), at + part.mib
        width = max(round(at * WIDTH / total) - start, 2 if part.mib else 0)
        out.append(Bar(part.name, start, width, f"{part.mib:,}", part.detail or ""))
    return tuple(out)


def gate(verdict: Object | None) -> Gate | None:
    """Measured, required and baseline on one scale."""
    if not verdict:
        return None
    names = ("measured", "required", "baseline")
    scale = max([1, *(verdict.get(name, 0) for name in names)])

    def bar(name: str) -> Bar | None:
        tokens = verdict.get(name, 0)
        if not tokens:
            return None
        return Bar(name, 0, round(tokens * WIDTH / scale), f"{tokens:,}")

    levels = {"Passed": "good", "Rejected": "bad"}
    return Gate(
        revision=verdict.get("revision", ""),
        result=verdict["result"],
        level=levels.get(verdict["result"], "busy"),
        message=verdict.get("message", ""),
        measured=bar("measured"),
        required=bar("required"),
        baseline=bar("baseline"),
    )


def replicas(view: View, now: datetime) -> tuple[Replica, ...]:
    most = max([1, *(p.kv_tokens or 0 for p in view.pods)])
    asked = view.spec.get("capacity") or {}
    minimums = Thresholds.minimums(asked.get("minKVTokens", 0), asked.get("minSequences", 0))
    ordered = sorted(view.pods, key=lambda p: (p.revision, p.name))
    return tuple(_replica(pod, minimums, most, now) for pod in ordered)


def _replica(pod: PodView, minimums: Thresholds, most: int, now: datetime) -> Replica:
    state = replica_state(pod, minimums)
    bad = state in ("BelowMinimum", "Unreachable", "Failed") or pod.failed is not None
    stages, seconds = _stages(pod.report)
    return Replica(
        name=pod.name,
        node=pod.node,
        state=state,
        level="good" if pod.ready else "bad" if bad else "busy",
        tokens=pod.kv_tokens or 0,
        share=round((pod.kv_tokens or 0) * WIDTH / most),
        revision=pod.revision,
        doing=line_of_start(pod.report, now) if pod.report is not None else "",
        attempts=_attempts(pod.report),
        stages=stages,
        seconds=seconds,
        warnings=pod.report.warnings if pod.report is not None else (),
    )


def _attempts(report: SizingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    return tuple(
        f"attempt {a.number} at {a.target_tokens:,} tokens: {a.outcome}"
        for a in report.attempts
        if a.number
    )


def _stages(report: SizingReport | None) -> tuple[tuple[Bar, ...], float]:
    """Stages of sizing as consecutive bars, and their total time in seconds."""
    if report is None or not report.stages:
        return (), 0.0
    total, at, out = max(1, sum(s.ms for s in report.stages)), 0, []
    for stage in report.stages:
        start, at = round(at * WIDTH / total), at + stage.ms
        width = max(1, round(at * WIDTH / total) - start)
        out.append(Bar(stage.name, start, width, f"{stage.ms / 1000:.1f} s", stage.detail or ""))
    return tuple(out), total / 1000


def history(past: tuple[RevisionEntry, ...], now: datetime) -> tuple[Row, ...]:
    out = []
    for item, older in zip(past, [*past[1:], None], strict=True):
        out.append(
            Row(
                name=item.name,
                phase=phase(item),
                age=age(item.created, now),
                verdict=verdict(item),
                measured=measured(item),
                required=item.state.required,
                changed=tuple(changes(older, item)) if older else (),
                image=item.image,
            )
        )
    return tuple(out)


def _condition_row(item: Object) -> ConditionRow:
    known = advise(item["type"], item["reason"])
    act = known is not None and known.do != NOTHING and item["status"] != "True"
    return ConditionRow(
        type=item["type"],
        state=_level(item),
        reason=item["reason"],
        message=item.get("message", ""),
        do=known.do if known is not None and act else "",
    )


BUSY = {
    "Pending",
    "Downloading",
    "Loading",
    "Autotuning",
    "Probing",
    "Stressing",
    "Validating",
    "RollingOut",
    "Scaling",
    "ScaledToZero",
    "Paused",
    "NoRecord",
    "Unknown",
}


def _level(condition: Object) -> str:
    if condition.get("status") == "True":
        return "good"
    return "busy" if condition.get("reason", "Pending") in BUSY else "bad"


def figure(value: int) -> str:
    return f"{value:,}" if value else "-"


# Numbers of four digits and more that stand alone, but those that are names.
_NUMBER = re.compile(r"(?<![^\s(])(?<!port )(?<!code )(?<!HTTP )\d{4,}(?=[\s);:,.%]|$)")


def grouped(message: str) -> str:
    """A message with its numbers as the page's figures are written."""
    return _NUMBER.sub(lambda found: f"{int(found[0]):,}", message)


def moment(stamp: str) -> str:
    """An RFC 3339 time in a readable form; anything else unchanged."""
    try:
        return datetime.fromisoformat(stamp).astimezone(UTC).strftime("%-d %b %Y, %H:%M UTC")
    except ValueError:
        return stamp


def age(stamp: str, now: datetime) -> str:
    if not stamp:
        return "now"
    number, unit = elapsed(stamp, now)
    return f"{number} {'min' if unit == 'm' else unit}"
