"""`kvline-server size`: runs the profile loop, prints its stages and a memory waterfall."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvline_contract.codec import ContractError
from kvline_contract.exits import ExitCode
from kvline_contract.launch import MAX_RECORDS, Device, LaunchConfig, Record
from kvline_contract.memory import Memory, rank_title
from kvline_contract.progress import line
from kvline_contract.report import Result, SizingReport, State
from kvline_server.errors import ConfigInvalid
from kvline_server.model.config import read_config
from kvline_server.options.flags import with_flag_names
from kvline_server.parent.supervisor import Supervisor
from kvline_server.sizing import record as records

BAR_WIDTH = 40
MIB = 1 << 20
INTERRUPTED = 130  # as a shell has it for SIGINT


def measure(supervisor: Supervisor) -> int:
    """Runs the profile loop and prints its stages. -> the exit code, INTERRUPTED after Ctrl-C"""
    console = Console(stderr=True)
    done = threading.Event()
    watcher = threading.Thread(target=_follow, args=(supervisor, console, done), daemon=True)
    watcher.start()
    keeper, health = supervisor.keeper, supervisor.health
    code = supervisor.run(  # there is no request to drain
        until=lambda: keeper.report.state is State.VALIDATED or health.draining
    )
    done.set()
    watcher.join(2)
    report = keeper.report
    if code == ExitCode.DRAINED and report.result is None:
        console.print("interrupted before a size was validated", style="yellow")
        return INTERRUPTED
    named = with_flag_names if supervisor.options.from_flags else str
    for warning in report.warnings:
        console.print(f"warning: {named(warning)}", markup=False, style="yellow")
    return code


def show(supervisor: Supervisor, as_json: bool, record: Path | None = None) -> int:
    """`measure`, and prints what it gave. -> the exit code"""
    code, report = measure(supervisor), supervisor.keeper.report
    if code == INTERRUPTED:
        return code
    if record is not None and report.result is not None:
        add_record(record, report.result)
    if as_json:
        # Read by `kubectl kvline size`, which may be of an earlier version.
        sys.stdout.write(report.dumps(version=1) + "\n")
    elif report.result is not None:
        for table in waterfalls(report.result, supervisor.device is Device.CUDA):
            Console().print(table)
        Console().print(summary(report, report.result, _own_length(supervisor)))
    return code


def _follow(supervisor: Supervisor, console: Console, done: threading.Event) -> None:
    """Prints each stage when it ends, and the progress of the current one."""
    shown = 0
    started = time.monotonic()
    with console.status("starting") as status:
        while True:
            report = supervisor.keeper.report
            passed = [s for s in report.stages if s.total_bytes is None]
            for stage in passed[shown:]:
                console.print(
                    f"  {stage.name:<26} {stage.ms / 1000:7.2f} s {stage.bytes / 2**20:9.1f} MiB"
                    f"  {stage.detail or ''}"
                )
            shown = len(passed)
            doing = line(report, datetime.now(UTC)) or str(report.state)
            status.update(f"{doing} ({time.monotonic() - started:.0f} s in all)")
            if done.wait(0.1):
                return


def waterfalls(result: Result, gpu: bool) -> list[Table]:
    """One of each rank. Where there are several, a heading names each and marks the one that
    limits the budget."""
    ranks = len(result.ranks)
    if ranks == 1:
        return [waterfall(result.memory)]
    binding = result.binding_rank
    return [
        waterfall(memory, rank_title(rank, ranks, gpu, rank == binding))
        for rank, memory in enumerate(result.ranks)
    ]


def waterfall(memory: Memory, heading: str | None = None) -> Table:
    """A waterfall chart: each part's bar begins where the one before ended."""
    table = Table(
        *("part", "MiB", "", ""), box=None, pad_edge=False, title=heading, title_justify="left"
    )
    table.columns[1].justify = "right"
    at = 0
    for part in memory.parts:
        start = round(at * BAR_WIDTH / memory.total_mib)
        at += part.mib
        end = max(round(at * BAR_WIDTH / memory.total_mib), start)
        bar = " " * start + "█" * (end - start)
        table.add_row(part.name, str(part.mib), bar, part.detail)
    table.add_row("total", str(memory.total_mib), "─" * BAR_WIDTH)
    return table


def _own_length(supervisor: Supervisor) -> int | None:
    """Of the model, where no length was asked for: then the cache may shorten it."""
    launch = LaunchConfig.parse(supervisor.options.config.read_bytes())
    asked = launch.engine.max_model_len is not None
    return None if asked else read_config(Path(launch.model.path)).max_position


def summary(report: SizingReport, result: Result, own_length: int | None = None) -> str:
    length = report.effective.max_model_len if report.effective else 0
    sequences = result.sequences(length) if length else 0
    shortened = f" of the model's {own_length}" if own_length and length < own_length else ""
    tries = max((a.number for a in report.attempts), default=0)
    ranks = len(result.ranks)
    each = "each" if ranks == 1 else f"each on every one of {ranks} ranks"
    slots = ""
    if result.state_slots is not None:
        mib = (result.slot_bytes or 0) / MIB
        kept = f"{result.snapshots or 0} snapshots of prefixes"
        each_state = f"{mib:.1f} MiB each in {result.state_dtype}"
        slots = f", {result.state_slots} sequences at once and {kept} of {each_state}"
    images = ""
    if report.effective is not None and report.effective.max_images_per_request is not None:
        bounds = report.effective.max_images_per_request, report.effective.max_image_patches
        images = ", at most {} images a request of {} patches each".format(*bounds)
    return (
        f"{result.kv_tokens} KV tokens ({result.bytes_per_token} bytes {each}), {sequences} full-"
        f"length sequences of {length}{shortened}{slots}{images}; {result.source} in "
        f"{result.loop_ms / 1000:.1f} s, validated in attempt {tries}"
    )


def read_records(path: Path) -> dict[str, Record]:
    """The records by fingerprint, empty without a file. Raises ConfigInvalid for any other file."""
    try:
        return records.read_records(path).records
    except ContractError as error:
        raise ConfigInvalid(f"{path}: {error}") from None


def check_writable(path: Path) -> None:
    """Raises ConfigInvalid where a record could not be written, or would replace another file."""
    read_records(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigInvalid(f"--write-record {path}: not a file in a folder that can be written")


def add_record(path: Path, result: Result) -> None:
    """Adds a budget to a file of records, which `--record` and pods read. The file is replaced
    atomically; beyond MAX_RECORDS the oldest record is dropped."""
    known = {k: v for k, v in read_records(path).items() if k != result.fingerprint}
    newest = [*known.items(), (result.fingerprint, Record.of(result))][-MAX_RECORDS:]
    records.write_records(path, dict(newest))
