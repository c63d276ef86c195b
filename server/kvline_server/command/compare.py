"""`kvline-server size --compare`: what each change of one setting would give, measured one after
the other, as each takes the whole device."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvline_contract.codec import ContractError, camel, encode
from kvline_contract.launch import Device, EngineOptions, Images, LaunchConfig, LoadFormat
from kvline_contract.memory import (
    ENCODER_CACHE,
    ENCODER_WORK,
    KV_CACHE,
    LOADED,
    SNAPSHOTS,
    STATES,
    Memory,
)
from kvline_contract.report import Result, SizingReport
from kvline_server.command.size import INTERRUPTED, add_record, measure
from kvline_server.errors import ModelUnsupported
from kvline_server.model import quantization, shard
from kvline_server.model.config import read_config
from kvline_server.model.fields import read_json
from kvline_server.options.flags import quantity, with_flag_names
from kvline_server.parent.supervisor import Supervisor

MAX_CHOICES = 8
AS_GIVEN = "as given"
# The spec's name of each setting, and where launch.json has it.
SETTINGS = {
    **{
        camel(field.name): ("engine", camel(field.name))
        for field in fields(EngineOptions)
        # One has no single value, and no size depends on the others.
        if field.name not in ("speculation", "default_max_tokens", "tool_call_parser", "images")
    },
    "modalities": ("engine", "images"),
    "gpus": ("tensorParallel",),
    "headroomMiB": ("capacity", "headroomMiB"),
}
# Values of the spec's `modalities`; a choice has no commas.
MODALITIES = {"text": None, "text+image": Images.REQUIRED}
OF_IMAGES = ("images", "maxImagesPerRequest", "maxImagePatches")
MEMORY = "memory"  # the container's limit, which no launch file has
WEIGHTS, UNQUANTISED = "weights", "unquantised"  # which is of random ones alone
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    launch: LaunchConfig
    memory: int | None = None  # bytes; None: as given


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    report: SizingReport


def choices(text: str, launch: LaunchConfig, own: Path) -> list[Choice]:
    """The launch as it is, then with each change of `text` alone, such as
    kvCacheDtype=fp8,gpus=2. What a choice needs of files is written into the folder `own`. Raises
    ContractError."""
    every = [each.strip() for each in text.split(",")]
    if launch.capacity.kv_tokens is not None:
        raise ContractError("a pinned kvTokens is the budget of every choice: leave it out")
    if len(every) > MAX_CHOICES:
        raise ContractError(f"expected at most {MAX_CHOICES} choices, got {len(every)}")
    if all(every) and len(set(every)) < len(every):
        raise ContractError("expected each choice once")
    return [Choice(AS_GIVEN, launch), *(_choice(each, launch, own) for each in every)]


def check_ranks(every: list[Choice]) -> None:
    """Before any is measured, which takes minutes. Raises ModelUnsupported, or what reading the
    model's config raises."""
    for choice in every:
        if (ranks := choice.launch.tensor_parallel) > 1:
            try:
                shard.check(read_config(Path(choice.launch.model.path)), ranks)
            except ModelUnsupported as error:
                raise ModelUnsupported(f"--compare, {choice.name}: {error}") from None


def check_memory(every: list[Choice], limit: int | None) -> None:
    """Before any is measured. `limit`: of the container, which a larger choice would be measured
    with in its place. Raises ContractError."""
    for choice in every:
        if choice.memory is not None and limit is not None and choice.memory > limit:
            raise ContractError(
                f"{choice.name}: more than the {limit >> 20} MiB that this container may take"
            )


def _choice(choice: str, launch: LaunchConfig, own: Path) -> Choice:
    field, _, value = choice.partition("=")
    if field == WEIGHTS and value:
        return Choice(choice, _unquantised(choice, launch, own))
    if field != MEMORY or not value:
        return Choice(choice, _changed(choice, launch))
    if launch.device is Device.CUDA:
        raise ContractError(f"{choice[:80]}: memory of the host holds no KV cache of a GPU")
    try:
        return Choice(choice, launch, quantity(value))
    except argparse.ArgumentTypeError as error:
        raise ContractError(f"{choice[:80]}: {error}") from None


def _unquantised(choice: str, launch: LaunchConfig, own: Path) -> LaunchConfig:
    """Of a folder with the same config.json, without its quantisation."""
    field, _, value = choice.partition("=")
    if value != UNQUANTISED:
        raise ContractError(f"{choice[:80]}: expected {field}={UNQUANTISED}")
    if launch.model.load_format is not LoadFormat.RANDOM:
        why = "the files have weights of one format, and random ones can have another"
        raise ContractError(f"{choice}: {why}: add --load random")
    source = Path(launch.model.path) / CONFIG
    config = read_json(source)
    if not config.pop(quantization.FIELD, None):
        raise ContractError(f"{choice}: {source} has no {quantization.FIELD}")
    folder = own / UNQUANTISED
    folder.mkdir()
    for file in source.parent.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / CONFIG).unlink()
    (folder / CONFIG).write_text(json.dumps(config))
    # No commit of a hub: a record of the given weights is not this one's.
    return replace(launch, model=replace(launch.model, path=str(folder), source=str(folder)))


def _changed(choice: str, launch: LaunchConfig) -> LaunchConfig:
    field, _, value = choice.partition("=")
    if field not in SETTINGS or not value:
        known = ", ".join((*SETTINGS, MEMORY, WEIGHTS))
        raise ContractError(f"expected FIELD=VALUE, of {known}; got {choice[:80]!r}")
    document: dict[str, Any] = encode(launch)
    if field == "modalities":
        return _with_modalities(choice, document)
    into = document
    *path, last = SETTINGS[field]
    for key in path:
        into = into[key]
    into[last] = int(value) if re.fullmatch(r"-?\d{1,12}", value) else value
    try:
        # Through the strict reader, so that a choice has the same bounds as a file.
        return LaunchConfig.parse(json.dumps(document))
    except ContractError as error:
        expected = str(error).partition(": ")[2]  # without the field's place in launch.json
        raise ContractError(f"{choice[:80]}: {expected}") from None


def _with_modalities(choice: str, document: dict[str, Any]) -> LaunchConfig:
    """Text alone has no bounds of images."""
    value = choice.partition("=")[2]
    if value not in MODALITIES:
        raise ContractError(f"{choice[:80]}: expected {' or '.join(MODALITIES)}")
    engine, images = document["engine"], MODALITIES[value]
    if images is None:
        engine = {key: given for key, given in engine.items() if key not in OF_IMAGES}
    else:
        engine = {**engine, "images": images}
    return LaunchConfig.parse(json.dumps({**document, "engine": engine}))


def show(
    every: list[Choice],
    start: Callable[[LaunchConfig, int | None], Supervisor],
    as_json: bool,
    record: Path | None,
) -> int:
    """Measures all and prints the table, also of those before Ctrl-C or beside one that fails.
    -> the exit code, of the first one that was not validated"""
    console, code = Console(stderr=True), 0
    measured: list[Measured] = []
    before: Supervisor | None = None
    for number, choice in enumerate(every, 1):
        console.print(f"{choice.name} ({number} of {len(every)})", style="bold", highlight=False)
        supervisor = start(choice.launch, choice.memory)
        if before is not None and before.health.draining:  # a signal before this one took them
            code = INTERRUPTED
            break
        before, ended = supervisor, measure(supervisor)
        if ended == INTERRUPTED:
            code = ended
            break
        code = code or ended
        report = supervisor.keeper.report
        measured.append(Measured(choice.name, report))
        if record is not None and report.result is not None:
            add_record(record, report.result)
    if not measured:
        return code
    if as_json:
        reports = {each.name: json.loads(each.report.dumps(version=1)) for each in measured}
        sys.stdout.write(json.dumps(reports) + "\n")
    else:
        out = Console()
        out.print(table(measured))
        left = [f"{choice.name}: interrupted, not measured" for choice in every[len(measured) :]]
        for line in (*notes(measured), *left):
            out.print(line, markup=False, highlight=False)
    return code


def table(measured: list[Measured]) -> Table:
    """A line each; memory is that of the rank with the least room."""
    headings: tuple[str, ...]
    headings = ("choice", "KV tokens", "ratio", "sequences", "weights\nMiB", "KV cache\nMiB")
    slots = any(r.result is not None and r.result.state_slots for r in (m.report for m in measured))
    headings += ("running +\nsnapshots", "states\nMiB") if slots else ()
    images = any(map(_encoder, (m.report.result for m in measured)))
    headings += ("encoder\nMiB",) if images else ()
    made = Table(*headings, box=None, pad_edge=False)
    for column in made.columns:
        column.no_wrap = True
        column.justify = "left" if column.header == "choice" else "right"
    first = measured[0].report.result if measured else None
    for each in measured:
        result, effective = each.report.result, each.report.effective
        if result is None or effective is None:
            made.add_row(each.name, *["-"] * (len(headings) - 1))
            continue
        memory = result.ranks[result.binding_rank]
        weights = sum(memory.mib(part) for part in LOADED)
        made.add_row(
            each.name,
            f"{result.kv_tokens:,}",
            f"{result.kv_tokens / first.kv_tokens:.2f}" if first is not None else "-",
            f"{result.sequences(effective.max_model_len):,} of {effective.max_model_len:,}",
            f"{weights:,}",
            f"{memory.mib(KV_CACHE):,}",
            *(_slots(result, memory) if slots else ()),
            *((f"{_encoder(result):,}",) if images else ()),
        )
    return made


def _encoder(result: Result | None) -> int:
    """MiB of the encoder of images beside its weights."""
    return result.memory.mib(ENCODER_WORK) + result.memory.mib(ENCODER_CACHE) if result else 0


def _slots(result: Result, memory: Memory) -> tuple[str, str]:
    """Of recurrent states; none of a model without any."""
    if result.state_slots is None:
        return "-", "-"
    states = memory.mib(STATES) + memory.mib(SNAPSHOTS)
    return f"{result.state_slots:,} + {result.snapshots or 0:,}", f"{states:,}"


def notes(measured: list[Measured]) -> list[str]:
    """What the table has no room for."""
    made = []
    for each in measured:
        result, failure = each.report.result, each.report.failure
        if failure is not None:
            made.append(f"{each.name}: {failure.name}: {with_flag_names(failure.message)}")
        elif result is not None and len(result.ranks) > 1:
            made.append(f"{each.name}: MiB on each of {len(result.ranks)} ranks")
    return made
