"""What a pod reports: SizingReport, Termination. Untrusted input to the operator.

Reports of REPORT_VERSIONS are read, and their unknown keys ignored; for any other version the error
names these. A pod serves the version that the request names (`served`). Version 3 has longer lists
than version 2; for earlier operators, which would refuse them, what is over is summed up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import parse_qs

from kvline_contract.codec import (
    MAX_TEXT,
    ContractError,
    decode,
    document,
    dumps,
    encode,
    field,
    loads,
)
from kvline_contract.exits import ExitCode
from kvline_contract.memory import HEADROOM, OTHERS, Memory, MemoryV1, Part

VERSION = 1  # of Termination, and of Load
REPORT_VERSIONS = (1, 2, 3)
REPORT_VERSION = REPORT_VERSIONS[-1]
MAX_RANKS = 8
MAX_GEMM_KERNELS = 64
MAX_REPORT_BYTES = 64 * 1024
MAX_TERMINATION_BYTES = 4096
MAX_STAGES = 36
MAX_STAGES_V2 = 32  # of versions 1 and 2
START_STAGES = 4  # of Current: load, warm up, measure, validate
MAX_START_STAGES = 32  # that are read
MAX_ATTEMPTS = 5
MAX_WARNINGS = 16


class State(StrEnum):
    LOADING = "Loading"
    AUTOTUNING = "Autotuning"
    PROBING = "Probing"
    STRESSING = "Stressing"
    VALIDATING = "Validating"
    SHRUNK_RETRY = "ShrunkRetry"
    VALIDATED = "Validated"
    FAILED = "Failed"


class Outcome(StrEnum):
    RUNNING = "Running"
    SURVIVED = "Survived"
    OUT_OF_MEMORY = "OutOfMemory"
    KILLED = "Killed"


class Source(StrEnum):
    MEASURED = "Measured"
    RECORDED = "Recorded"
    PINNED = "Pinned"


class Binding(StrEnum):
    """The binding constraint: what the memory was too small for."""

    WEIGHTS = "Weights"
    ACTIVATIONS = "Activations"
    CONTEXT = "Context"
    MINIMUM = "Minimum"
    NEIGHBOURS = "Neighbours"
    HOST_MEMORY = "HostMemory"


class Direction(StrEnum):
    RAISE = "raise"
    LOWER = "lower"


@document
class Attempt:
    """One validation at a final size; number 0 is the probe."""

    number: int = field(high=16)
    target_tokens: int
    outcome: Outcome
    lowest_free_mib: int | None = field("lowestFreeMiB", low=-(2**31), default=None)


@document
class Stage:
    name: str = field(limit=64)
    ms: int
    bytes: int = field(low=-(2**53))
    detail: str | None = field(limit=256, omit_none=True, default=None)
    # Only while it runs, where it is known: `bytes` of these are done.
    total_bytes: int | None = field(omit_none=True, default=None)


D = TypeVar("D", Part, Stage)


def summed(stages: tuple[Stage, ...], most: int = MAX_STAGES) -> tuple[Stage, ...]:
    """`most` of these at most: the shortest that have ended are one, the last of those."""
    if len(stages) <= most:
        return stages
    ended = [stage for stage in stages if stage.total_bytes is None]
    running = (stage for stage in stages if stage.total_bytes is not None)
    shortest = sorted(range(len(ended)), key=lambda i: (ended[i].name != OTHERS, ended[i].ms))
    few = set(shortest[: len(stages) + 1 - most])
    ms, nbytes = sum(ended[i].ms for i in few), sum(ended[i].bytes for i in few)
    rest = Stage(OTHERS, ms, nbytes, "the shortest stages")
    return (*(stage for i, stage in enumerate(ended) if i not in few), rest, *running)


@document
class Current:
    """What a start does now, for people: `stage` n of `stages`."""

    stage: int = field(low=1, high=MAX_START_STAGES)
    stages: int = field(low=1, high=MAX_START_STAGES)
    what: str = field(limit=128)
    since: str = field(limit=32)
    # Of the stage, the step that runs: its number, how many there are, and its name.
    step: int | None = field(low=1, omit_none=True, default=None)
    steps: int | None = field(low=1, omit_none=True, default=None)
    name: str | None = field(limit=64, omit_none=True, default=None)
    ready_at: str | None = field(limit=32, omit_none=True, default=None)  # expected Validated


@document
class Knob:
    """A field of the spec that would help if it were raised or lowered."""

    spec_field: str = field("field", limit=64)
    direction: Direction
    # With which a start would succeed, in the field's unit, of memory in MiB.
    value: int | None = field(omit_none=True, default=None)
    with_next: bool | None = field(omit_none=True, default=None)  # it helps with the next alone


@document
class Termination:
    """Why a pod ended; at most 4096 bytes, in the container's termination message."""

    version: int
    code: int = field(high=255)
    name: str = field(limit=64)
    message: str = field(limit=1024)
    memory: MemoryV1 | None = field(omit_none=True, default=None)
    binding: Binding | None = field(omit_none=True, default=None)
    largest_max_model_len: int | None = field(omit_none=True, default=None)
    knobs: tuple[Knob, ...] = field(items=8, default=())
    attempts: tuple[Attempt, ...] = field(items=MAX_ATTEMPTS, default=())

    @classmethod
    def of(cls, code: ExitCode, message: str) -> Termination:
        return cls(VERSION, int(code), code.title, message[:1024])

    @classmethod
    def parse(cls, text: str | bytes) -> Termination:
        value = loads(text, MAX_TERMINATION_BYTES)
        check_version(value, "termination message")
        return decode(cls, value, strict=False)

    def dumps(self) -> str:
        """At most MAX_TERMINATION_BYTES; the message is cut until the whole fits, and last the
        parts beyond those of version 1."""
        short = dataclasses.replace(self, message=self.message[:1024])
        while len(dumps(short).encode()) > MAX_TERMINATION_BYTES:
            if not short.message and short.memory is not None:
                short = dataclasses.replace(
                    short, memory=dataclasses.replace(short.memory, parts=None)
                )
            message = short.message[: len(short.message) // 2]
            short = dataclasses.replace(short, message=message)
        return dumps(short)


@document
class Effective:
    """The engine settings with defaults filled in."""

    max_model_len: int
    max_running_requests: int
    max_prefill_tokens: int
    max_top_logprobs: int
    headroom_mib: int = field("headroomMiB")
    page_size: int
    logprob_rows: int
    # Of requests with images; absent: text alone is served.
    max_images_per_request: int | None = field(low=1, omit_none=True, default=None)
    max_image_patches: int | None = field(low=4, omit_none=True, default=None)


@document
class Result:
    """The validated KV budget. Present only in state Validated."""

    kv_tokens: int = field("kvTokens", low=1)
    bytes_per_token: int = field(low=1)
    source: Source
    fingerprint: str = field(limit=64)
    free_mib: int = field("freeMiB")
    loop_ms: int
    saved_ms: int
    measured_at: str = field(limit=32)
    ranks: tuple[Memory, ...] = field(items=MAX_RANKS)  # of each GPU; one on a CPU
    # The autotuner's choices on a GPU: rows, output width, input width, kernel number.
    gemm_kernels: tuple[str, ...] = field(items=MAX_GEMM_KERNELS, limit=48, default=())
    # Such as bfloat16; servers of version 1 do not report it.
    cache_dtype: str | None = field(limit=16, omit_none=True, default=None)
    # Of a token that no layer's window has left; absent where no layer has one. As bytes_per_token
    # where a sequence is never longer than the window.
    full_bytes_per_token: int | None = field(low=1, omit_none=True, default=None)
    # KV tokens that a sequence of the longest length takes; absent where these are all of its own.
    sequence_tokens: int | None = field(low=1, omit_none=True, default=None)
    # Slots of recurrent states: of sequences that run at once, and of prefixes; the bytes of one,
    # on a rank, and the dtype of its matrices. Absent where no layer keeps a state.
    state_slots: int | None = field(low=1, omit_none=True, default=None)
    snapshots: int | None = field(omit_none=True, default=None)
    slot_bytes: int | None = field(low=1, omit_none=True, default=None)
    state_dtype: str | None = field(limit=16, omit_none=True, default=None)
    # Those bytes with StateDtype.BFLOAT16, where that is served and was not asked for.
    bfloat16_slot_bytes: int | None = field(low=1, omit_none=True, default=None)

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ContractError("ranks: expected one or more")

    @property
    def compared_bytes(self) -> int:
        """Bytes a token by which sizes are compared: those of a server that frees less are too."""
        return self.full_bytes_per_token or self.bytes_per_token

    def sequences(self, length: int) -> int:
        """Sequences of so many tokens that the KV cache and the slots hold at once."""
        held = self.kv_tokens // max(1, self.sequence_tokens or length)
        return min(held, self.state_slots or held)

    @property
    def binding_rank(self) -> int:
        """The rank that limits the budget: the one with the least left."""
        return min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].mib(HEADROOM))

    @property
    def memory(self) -> Memory:
        """Of the binding rank."""
        return self.ranks[self.binding_rank]


@document
class Provenance:
    gpu: str = field(limit=128)
    driver: str = field(limit=64)
    image: str = field(limit=512)
    model_revision: str = field(limit=64)
    libraries: dict[str, str] = field(items=16, limit=64)


@document
class SizingReport:
    """As versions 2 and 3 have it, whichever version was read."""

    pod_uid: str = field("podUID", limit=64)
    pod_name: str = field(limit=253)
    revision: str = field(limit=16)
    sequence: int
    state: State
    started_at: str = field(limit=32)
    updated_at: str = field(limit=32)
    effective: Effective | None = field(default=None)
    stages: tuple[Stage, ...] = field(items=MAX_STAGES, default=())
    attempts: tuple[Attempt, ...] = field(items=MAX_ATTEMPTS, default=())
    result: Result | None = field(default=None)
    failure: Termination | None = field(default=None)
    warnings: tuple[str, ...] = field(items=MAX_WARNINGS, limit=512, default=())
    provenance: Provenance | None = field(default=None)
    # While a start goes on; older servers do not report it.
    current: Current | None = field(omit_none=True, default=None)

    def __post_init__(self) -> None:
        if (self.result is not None) != (self.state is State.VALIDATED):
            raise ContractError("result: present exactly in state Validated")

    @classmethod
    def parse(cls, text: str | bytes) -> SizingReport:
        value = loads(text, MAX_REPORT_BYTES)
        if check_version(value, "report", REPORT_VERSIONS) == 1:
            _upgrade(value.get("result"))
        return decode(cls, value, strict=False)

    def dumps(self, version: int = REPORT_VERSION) -> str:
        """At most MAX_REPORT_BYTES: what is for people alone is cut until the whole fits."""
        check_version({"version": version}, "report", REPORT_VERSIONS)
        report = self if version > 2 else self._with_few_items()
        text, most = report._written(version), MAX_TEXT
        while len(text.encode()) > MAX_REPORT_BYTES and most:
            most //= 2
            text = report._cut(most)._written(version)
        return text

    def _written(self, version: int) -> str:
        """Version 1 has the memory of one rank; with more, its readers ignore `ranks`."""
        value = {"version": version, **encode(self)}
        if version == 1 and self.result is not None:
            value["result"]["memory"] = encode(MemoryV1.of(self.result.memory))
            if len(self.result.ranks) == 1:
                del value["result"]["ranks"]
        return dumps(value)

    def _with_few_items(self) -> SizingReport:
        """As many as readers of versions 1 and 2 accept."""
        short = dataclasses.replace(self, stages=summed(self.stages, MAX_STAGES_V2))
        return short._with_ranks(Memory.stored)

    def _cut(self, most: int) -> SizingReport:
        """With so many characters of each detail and warning."""

        def cut(item: D) -> D:
            return dataclasses.replace(item, detail=item.detail and item.detail[:most])

        return dataclasses.replace(
            self,
            stages=tuple(map(cut, self.stages)),
            warnings=tuple(text[:most] for text in self.warnings),
        )._with_ranks(lambda rank: dataclasses.replace(rank, parts=tuple(map(cut, rank.parts))))

    def _with_ranks(self, changed: Callable[[Memory], Memory]) -> SizingReport:
        if self.result is None:
            return self
        ranks = tuple(map(changed, self.result.ranks))
        return dataclasses.replace(self, result=dataclasses.replace(self.result, ranks=ranks))


def _upgrade(result: Any) -> None:
    """A result of version 1, changed to one of version 2."""
    if isinstance(result, dict) and "ranks" not in result and "memory" in result:
        found = decode(MemoryV1, result["memory"], strict=False, path="result.memory")
        result["ranks"] = [encode(found.upgraded())]


def served(query: str) -> int:
    """The report's version for a request with this query. `version` is the newest one that who asks
    reads; operators from before version 2 do not send it. Raises ContractError for no number."""
    asked = parse_qs(query, keep_blank_values=True).get("version", ["1"])[-1]
    if not re.fullmatch("[1-9][0-9]{0,8}", asked):
        raise ContractError(f"version: expected a number from 1, got {asked[:20]!r}")
    return min(int(asked), REPORT_VERSION)


def check_version(value: dict[str, Any], what: str, known: tuple[int, ...] = (VERSION,)) -> int:
    got = value.get("version")
    if type(got) is not int or got not in known:
        *others, last = map(str, known)
        readable = f"{', '.join(others)} and {last}" if others else last
        raise ContractError(f"version: {what} of version {got!r:.20}, {readable} can be read here")
    return got
