"""Tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.table import Table
from rich.text import Text

from kvline_contract.memory import Memory
from kvline_contract.report import SizingReport
from kvline_kubectl.check import Answer, Result
from kvline_operator.observe.pods import condition_of
from kvline_operator.report.advice import NOTHING, advise
from kvline_operator.report.causes import BEFORE_SIZING, causes
from kvline_operator.report.display import (
    Titled,
    changes,
    elapsed,
    images,
    images_text,
    measured,
    memories,
    phase,
    reported,
    slots,
    slots_text,
    token_bytes,
    verdict,
    wanted,
)
from kvline_operator.report.estimates import ARITHMETIC, per_gib, rows
from kvline_operator.report.kstatus import plain
from kvline_operator.report.status_cache import RevisionEntry

Object = dict[str, Any]
BAR = 30  # columns: with names, figures and details a line has 80 at most
BARS = " "  # the column's head; one without a name wraps
COLORS = {"True": "green", "False": "red", "Unknown": "yellow"}


WRAPPED = ("MESSAGE", "CHANGED", "")  # columns of prose, which wrap within the terminal
PROSE = 20  # columns that prose has at least


class Lines(Table):
    """Names and figures are whole: a terminal that is too narrow wraps the line, as of kubectl."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, self._whole())
        yield from super().__rich_console__(console, options.update(max_width=width))

    def _whole(self) -> int:
        found = 0
        for column in self.columns:
            cells = [c for c in (column.header, *column.cells) if isinstance(c, str | Text)]
            longest = max((cell_len(str(cell)) for cell in cells), default=0)
            found += (longest if column.no_wrap else min(longest, PROSE)) + 2
        return found


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    made = Lines(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: JustifyMethod = "right" if name in right else "left"
        made.add_column(name, justify=justify, overflow="fold", no_wrap=name not in WRAPPED)
    return made


def services(bodies: list[Object], with_namespace: bool) -> Table:
    """One line for each service."""
    figures = {
        "KV TOKENS": "kvTokens",
        "IN ALL": "kvTokensTotal",
        "FULL SEQS": "fullLengthSequences",
    }
    if any("sequences" in ((body.get("status") or {}).get("capacity") or {}) for body in bodies):
        figures["SEQUENCES"] = "sequences"  # of models whose layers keep recurrent states
    head = ["NAME", "READY", "REASON", "REPLICAS", *figures, "REVISION", "GATE"]
    head = ["NAMESPACE", *head] if with_namespace else head
    made = table(*head, right=("REPLICAS", *figures))
    for body in bodies:
        meta, status = body["metadata"], body.get("status") or {}
        ready, capacity = condition_of(status, "Ready"), status.get("capacity") or {}
        rollout = status.get("rollout") or {}
        made.add_row(
            *([meta["namespace"]] if with_namespace else []),
            meta["name"],
            Text(ready.get("status", "-"), COLORS.get(ready.get("status", ""), "")),
            status.get("reason") or ready.get("reason", "-"),
            f"{status.get('readyReplicas', 0)}/{wanted(body['spec'], status)}",
            *(number(capacity.get(key)) for key in figures.values()),
            rollout.get("stableRevision") or "-",
            (rollout.get("gate") or {}).get("result", "-"),
        )
    return made


def service(body: Object) -> RenderableType:
    """One service: capacity, memory, conditions, replicas, gate."""
    status = body.get("status") or {}
    parts: list[RenderableType] = [services([body], False)]
    capacity = status.get("capacity")
    if capacity:
        parts += waterfalls(memories(status))
        parts.append(
            f"{token_bytes(status)}, {capacity['source']} at "
            f"{capacity['measuredAt']}, validated in attempt {capacity['attempts']}"
        )
        parts += [text for text in (slots(status), images(status)) if text]
        if not capacity.get("serving", True):
            parts.append(Text(f"no replica serves now; the last one served until {_as_of(status)}"))
        parts += estimates(status)
    made = table("CONDITION", "STATUS", "REASON", "MESSAGE")
    for item in plain(status):
        state = Text(item["status"], COLORS[item["status"]])
        made.add_row(item["type"], state, item["reason"], Text(item.get("message", "")))
    parts += ["", made]
    sizing = status.get("replicaSizing") or []
    shown = {"KV TOKENS": "kvTokens", "ATTEMPTS": "attempts"}
    shown |= {"SEQUENCES": "sequences"} if any("sequences" in item for item in sizing) else {}
    made = table("REPLICA", "NODE", "STATE", *shown, right=shown)
    for item in sizing:
        figures = [number(item.get(key)) for key in shown.values()]
        made.add_row(item["pod"], item.get("node", "-"), item["state"], *figures)
    parts += ["", made]
    gate = (status.get("rollout") or {}).get("gate")
    if gate:
        text = f"gate of revision {gate['revision']}: {gate['result']}; {gate['message']}"
        parts += ["", Text(text)]
    return Group(*parts)


def waterfalls(titled: Titled) -> list[RenderableType]:
    """Memory of each rank, with its title where there are several."""
    parts: list[RenderableType] = []
    for title, device in titled:
        parts += ["", *([Text(title, "bold")] if title else []), waterfall(device)]
    return parts


def waterfall(device: Memory) -> Table:
    """Parts of the memory as consecutive bars."""
    made = table("MEMORY", "MIB", BARS, "", right=("MIB",))
    total, at = device.total_mib, 0
    for part in device.parts:
        start, at = round(at * BAR / total), at + part.mib
        end = max(round(at * BAR / total), start + (part.mib > 0))
        made.add_row(part.name, number(part.mib), " " * start + "█" * (end - start), part.detail)
    made.add_row("total", number(total), "─" * BAR)
    return made


def sized(report: SizingReport) -> RenderableType:
    """A measured spec: its memory and its KV budget."""
    result, effective = report.result, report.effective
    assert result is not None, "of a report with a result"
    length = effective.max_model_len if effective else 0
    text = (
        f"{number(result.kv_tokens)} KV tokens of {number(result.bytes_per_token)} bytes, "
        f"{result.sequences(length) if length else 0} full-length sequences of {length:,}"
    )
    if result.state_slots is not None:
        found = (result.state_slots, result.snapshots or 0, result.slot_bytes or 0)
        text += f"; {slots_text(*found, result.state_dtype)}"
    bounds = effective and (effective.max_images_per_request, effective.max_image_patches)
    if bounds and (of_images := images_text(*bounds)):
        text += f"; {of_images}"
    return Group(*waterfalls(reported(report)), text)


def comparison(reports: dict[str, SizingReport]) -> RenderableType:
    """A line for each choice, and under the table why one was not validated."""
    columns = ["CHOICE", "KV TOKENS", "RATIO", "FULL SEQS"]
    results = [report.result for report in reports.values()]
    has_slots = any(found is not None and found.state_slots is not None for found in results)
    columns += ["SEQUENCES", "SNAPSHOTS"] if has_slots else []
    has_images = any(found is not None and found.memory.encoder() for found in results)
    columns += ["IMAGES MIB"] if has_images else []
    made, why = table(*columns, right=columns[1:]), []
    first = next(iter(reports.values())).result
    for name, report in reports.items():
        result, effective = report.result, report.effective
        if result is None or effective is None:
            made.add_row(name, *["-"] * (len(columns) - 1))
            text = report.failure.message if report.failure else f"ended in state {report.state}"
            why.append(Text(f"{name}: {text}", "red"))
            continue
        ratio = f"{result.kv_tokens / first.kv_tokens:.2f}" if first is not None else "-"
        sequences = number(result.sequences(max(1, effective.max_model_len)))
        slots_of = [number(result.state_slots), number(result.snapshots)] if has_slots else []
        encoder = [number(sum(result.memory.encoder().values()))] if has_images else []
        made.add_row(name, number(result.kv_tokens), ratio, sequences, *slots_of, *encoder)
    return Group(made, *why)


def answer(made: Answer, measure: str) -> RenderableType:
    """Whether a manifest would pass its gate; `measure`: the command that measures it."""
    color = {Result.PASSES: "green", Result.UNKNOWN: "yellow"}.get(made.result, "red")
    of = f" (revision {made.revision})" if made.revision else ""
    parts = [Text(f"{made.result}{of}", f"bold {color}"), Text(made.message)]
    if made.result is Result.UNKNOWN:
        parts.append(Text(f"{measure} measures it, without applying it"))
    return Group(*parts)


def estimates(status: Object) -> list[RenderableType]:
    """What would give each replica more KV tokens; empty before one has served."""
    parts: list[RenderableType] = ["", per_gib(status)] if per_gib(status) else []
    if shown := rows(status):
        made = table("WOULD GIVE A REPLICA", "KV TOKENS", "OF NOW", right=("KV TOKENS", "OF NOW"))
        for row in shown:
            made.add_row(row.change, row.tokens, row.ratio)
        parts += ["", made, Text(ARITHMETIC, "dim")]
    return parts


def explain(body: Object, events: list[Object]) -> RenderableType:
    """Why a service does not match its spec, and what to do."""
    meta, status = body["metadata"], body.get("status") or {}
    if not status.get("conditions"):
        return f"{meta['name']}: no status yet; is the operator running?"
    parts: list[RenderableType] = []
    stale = status.get("observedGeneration", 0) < meta.get("generation", 0)
    if stale:
        parts += ["The operator has not reconciled the newest spec yet.", ""]
    ready = condition_of(status, "Ready")
    head = "serves" if ready.get("status") == "True" else f"does not serve: {ready.get('reason')}"
    parts.append(Text(f"{meta['name']} {head}. {ready.get('message', '')}", "bold"))
    unmet = causes(status["conditions"])
    for item in unmet:
        known = advise(item["type"], item["reason"])
        color = COLORS["False" if item["status"] == "False" else "Unknown"]
        parts += ["", Text(f"{item['type']}: {item['reason']}", color)]
        parts.append(Text(f"  now:  {item.get('message', '')}"))
        if known is not None:
            parts.append(Text(f"  what: {known.happened}"))
            parts += [Text(f"  do:   {known.do}")] if known.do != NOTHING else []
    current = condition_of(status, "UpToDate")
    if ready.get("status") == "True" and current.get("status") == "False" and current not in unmet:
        parts += ["", Text(f"Meanwhile: {current.get('message', '')}")]
    if not unmet and ready.get("status") == "True":
        parts.append("All conditions are met.")
    parts += _diagnosis(status.get("diagnosis") or {})
    if not (status.get("capacity") or {}).get("serving", True):
        tokens = number(status["capacity"]["kvTokens"])
        parts += ["", f"No replica serves; the last one had {tokens} KV tokens ({_as_of(status)})."]
    shown = memories(status)
    parts += waterfalls(shown) if len(shown) > 1 else []
    parts += ["", images(status)] if images(status) else []
    if not any(item["type"] in BEFORE_SIZING for item in unmet):
        parts += estimates(status)
    for text in status.get("warnings") or []:
        parts += ["", Text(f"Warning: {text}", "yellow")]
    if events:
        made = table("AGE", "EVENT", "MESSAGE")
        for item in events[-8:]:
            made.add_row(age(item.get("lastTimestamp")), item["reason"], Text(item["message"]))
        parts += ["", made]
    return Group(*parts)


def _diagnosis(found: Object) -> list[RenderableType]:
    """status.diagnosis: the binding constraint and the fields that would help."""
    parts: list[RenderableType] = []
    if found.get("binding"):
        parts.append(f"  binding constraint: {found['binding']}")
    if found.get("largestMaxModelLen"):
        parts.append(f"  largest spec.engine.maxModelLen that fits: {found['largestMaxModelLen']}")
    what = "would help"
    for knob in found.get("knobs") or []:
        in_mib = isinstance(knob.get("value"), int) and knob["field"].endswith(".memory")
        unit = "Mi" if in_mib else ""
        to = f" to {knob['value']}{unit}" if knob.get("value") is not None else ""
        parts.append(f"  {what}: {knob['direction']} {knob['field']}{to}")
        what = "  and with it" if knob.get("withNext") else "would help"
    return ["", f"Revision {found['revision']}:", *parts] if parts else []


def _as_of(status: Object) -> str:
    return str(status["capacity"].get("asOf", "a moment ago"))


def history(past: tuple[RevisionEntry, ...]) -> Table:
    """One line for each revision, newest first, with its changes."""
    columns = ("REVISION", "AGE", "PHASE", "GATE", "MEASURED", "REQUIRED", "BASELINE", "CHANGED")
    made = table(*columns, right=("MEASURED", "REQUIRED", "BASELINE"))
    for item, older in zip(past, [*past[1:], None], strict=True):
        changed = ", ".join(changes(older, item)) if older else "the oldest one kept"
        made.add_row(
            item.name,
            age(item.created),
            phase(item) or "-",
            verdict(item) or "-",
            number(measured(item)),
            number(item.state.required),
            number(item.state.verdict.baseline if item.state.verdict else 0),
            Text(changed),
        )
    return made


def number(value: int | None) -> str:
    return f"{value:,}" if value else "-"


def age(stamp: str | None) -> str:
    if not stamp:
        return "-"
    count, unit = elapsed(stamp, datetime.now(UTC))
    return f"{count}{unit}"


def as_json(value: Any) -> None:
    Console(soft_wrap=True, highlight=False).print(json.dumps(value, indent=2), markup=False)
