"""State across restarts: this pod's attempts, records of identical replicas, fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.launch import FREE_NOISE, Record, Records, Reuse
from kvline_contract.launch import VERSION as RECORDS_VERSION
from kvline_contract.report import MAX_ATTEMPTS, Attempt, Outcome, Result, Source

VERSION = 1
OWN_RECORD = "record.json"


@document
class _AttemptsFile:
    version: int
    fingerprint: str = field(limit=64)
    attempts: tuple[Attempt, ...] = field(items=MAX_ATTEMPTS, default=())
    recorded: int = field(high=16, default=0)  # the attempt at a recorded size; 0: none


class AttemptStore:
    """attempts.json: each attempt is written before it begins, so that a kill leaves a trace.

    A file with another fingerprint, or an unreadable one, counts as empty: other settings need a
    new search.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fingerprint = ""
        self.attempts: tuple[Attempt, ...] = ()
        self.recorded = 0  # number of the attempt at a recorded size; 0: none of them was

    def open(self, fingerprint: str, gpu: bool) -> None:
        """Reads the failed attempts of an earlier start; those still Running were killed, which on
        a GPU says nothing about their size: its KV cache takes no host memory. Attempts that
        survived are ignored: that start ended for another reason."""
        self.fingerprint = fingerprint
        self.attempts, self.recorded = (), 0
        found = self._read()
        if found is not None and (found.version, found.fingerprint) == (VERSION, fingerprint):
            self.recorded = found.recorded
            self._keep(
                replace(a, outcome=Outcome.KILLED) if a.outcome is Outcome.RUNNING else a
                for a in found.attempts
                if a.outcome is not Outcome.SURVIVED
                and not (gpu and a.outcome in (Outcome.RUNNING, Outcome.KILLED))
            )

    def begin(self, number: int, target_tokens: int, recorded: bool = False) -> Attempt:
        attempt = Attempt(number, target_tokens, Outcome.RUNNING)
        if recorded:
            self.recorded = number
        self._keep((*self.attempts, attempt))
        self._write()
        return attempt

    def end(self, outcome: Outcome, lowest_free_mib: int | None) -> Attempt:
        done = replace(self.attempts[-1], outcome=outcome, lowest_free_mib=lowest_free_mib)
        self._keep((*self.attempts[:-1], done))
        self._write()
        return done

    def fail(self) -> None:
        """Ends the current attempt of an engine that ran out of memory and has ended."""
        found = self._read()
        if found is None:
            return
        self.fingerprint, self.recorded = found.fingerprint, found.recorded
        self._keep(
            replace(a, outcome=Outcome.OUT_OF_MEMORY) if a.outcome is Outcome.RUNNING else a
            for a in found.attempts
        )
        self._write()

    def forget(self) -> None:
        """Drops the current attempt: the device failed, so it shows nothing about its size."""
        self._keep(self.attempts[:-1])
        self._write()

    def put_back(self, attempts: tuple[Attempt, ...]) -> None:
        """Instead of those that have come since."""
        self._keep(attempts)
        self._write()

    def interrupt(self) -> None:
        """Drops the current attempt: its engine was stopped on purpose, not by its size."""
        found = self._read()
        if found is None:
            return
        self.fingerprint, self.recorded = found.fingerprint, found.recorded
        self._keep(a for a in found.attempts if a.outcome is not Outcome.RUNNING)
        self._write()

    def clear(self) -> None:
        """Called at Validated: a later kill is no failed attempt."""
        self.path.unlink(missing_ok=True)

    def _keep(self, attempts: Iterable[Attempt]) -> None:
        self.attempts = tuple(attempts)[-MAX_ATTEMPTS:]
        if all(a.number != self.recorded for a in self.attempts):
            self.recorded = 0  # that attempt does not count, or is long past

    def _read(self) -> _AttemptsFile | None:
        try:
            return decode(_AttemptsFile, loads(self.path.read_bytes(), 16384), strict=False)
        except (FileNotFoundError, ContractError):
            return None

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        with part.open("w") as file:
            kept = _AttemptsFile(VERSION, self.fingerprint, self.attempts, self.recorded)
            file.write(dumps(kept))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)


def find_record(
    shared: Path | None, folder: Path, fingerprint: str, free_mib: int
) -> Record | None:
    """The record of an identical replica, or the one that an earlier start of this pod left in
    `folder`, if that is newer: its volume of shared records may lag behind by more than a minute,
    and a shared size that failed here is still shared. None where reuse is not allowed, or less
    memory is free than either had."""
    if shared is None:
        return None
    try:
        records = read_records(shared)
    except ContractError:
        return None  # a damaged file holds no record
    if records.reuse is Reuse.NEVER:
        return None
    found = [records.records.get(fingerprint)]
    with suppress(ContractError):
        found.append(read_records(folder / OWN_RECORD).records.get(fingerprint))
    usable = [r for r in found if r is not None and free_mib + FREE_NOISE >= r.free_mib]
    return max(usable, key=lambda record: record.measured_at, default=None)


def keep_record(folder: Path, result: Result) -> None:
    """Leaves a measured budget for the next start of the same pod."""
    if result.source is Source.MEASURED:
        write_records(folder / OWN_RECORD, {result.fingerprint: Record.of(result)})


def read_records(path: Path) -> Records:
    """No records without a file. Raises ContractError for any other file."""
    if not path.is_file():
        return Records(RECORDS_VERSION, Reuse.AUTO, {})
    return Records.parse(path.read_bytes())


def unreadable(path: Path) -> str | None:
    """Why a file that a person named gives no records: the search that follows takes longer."""
    try:
        read_records(path)
    except (OSError, ContractError) as error:
        return f"{path}: {error}"
    return None if path.is_file() else f"{path}: no such file"


def write_records(path: Path, records: dict[str, Record]) -> None:
    """Replaces the file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(dumps(Records(RECORDS_VERSION, Reuse.AUTO, records)))
    part.replace(path)


def fingerprint(parts: dict[str, str | int]) -> str:
    """32 hex digits over everything that can change the budget."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
