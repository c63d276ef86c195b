"""What a pod reports: SizingReport, Termination, Load. Untrusted input to the operator.

Reports of this version and of the one before are read, and their unknown keys ignored; for any
other version the error names both.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads

VERSION = 1
READABLE_VERSIONS = (VERSION,)  # version 0 never shipped; the one before joins when there is a 2
MAX_GEMM_KERNELS = 64
MAX_REPORT_BYTES = 64 * 1024
MAX_LOAD_BYTES = 4096
MAX_TERMINATION_BYTES = 4096
MAX_STAGES = 32
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
class Memory:
    """Use of the device's memory in MiB. The parts add up exactly to the total."""

    total_mib: int = field("totalMiB")
    weights_mib: int = field("weightsMiB")
    activations_mib: int = field("activationsMiB")
    graphs_mib: int = field("graphsMiB")
    kv_mib: int = field("kvMiB")
    headroom_mib: int = field("headroomMiB")
    # The rest; negative when the parts, measured at different moments, overlap.
    others_mib: int = field("othersMiB", low=-(2**31))

    def __post_init__(self) -> None:
        if sum(mib for _, mib in self.parts()) != self.total_mib:
            raise ContractError("the MiB parts do not add up to totalMiB")

    def parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", self.weights_mib),
            ("activations", self.activations_mib),
            ("graphs", self.graphs_mib),
            ("KV cache", self.kv_mib),
            ("headroom", self.headroom_mib),
            ("others", self.others_mib),
        )


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


@document
class Knob:
    """A field of the spec that would help if it were raised or lowered."""

    spec_field: str = field("field", limit=64)
    direction: Direction
    value: int | None = field(omit_none=True, default=None)


@document
class Termination:
    """Why a pod ended; at most 4096 bytes, in the container's termination message."""

    version: int
    code: int = field(high=255)
    name: str = field(limit=64)
    message: str = field(limit=1024)
    memory: Memory | None = field(omit_none=True, default=None)
    binding: Binding | None = field(omit_none=True, default=None)
    largest_max_model_len: int | None = field(omit_none=True, default=None)
    knobs: tuple[Knob, ...] = field(items=8, default=())
    attempts: tuple[Attempt, ...] = field(items=MAX_ATTEMPTS, default=())

    @classmethod
    def parse(cls, text: str | bytes) -> Termination:
        value = loads(text, MAX_TERMINATION_BYTES)
        check_version(value, "termination message")
        return decode(cls, value, strict=False)

    def dumps(self) -> str:
        """At most MAX_TERMINATION_BYTES; the message is cut until the whole fits."""
        message = self.message[:1024]
        while True:
            text = dumps(dataclasses.replace(self, message=message))
            if len(text.encode()) <= MAX_TERMINATION_BYTES:
                return text
            message = message[: len(message) // 2]


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
    memory: Memory
    # The autotuner's choices on a GPU: rows, output width, input width, kernel number.
    gemm_kernels: tuple[str, ...] = field(items=MAX_GEMM_KERNELS, limit=48, default=())


@document
class Provenance:
    gpu: str = field(limit=128)
    driver: str = field(limit=64)
    image: str = field(limit=512)
    model_revision: str = field(limit=64)
    libraries: dict[str, str] = field(items=16, limit=64)


@document
class SizingReport:
    version: int
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

    def __post_init__(self) -> None:
        if (self.result is not None) != (self.state is State.VALIDATED):
            raise ContractError("result: present exactly in state Validated")

    @classmethod
    def parse(cls, text: str | bytes) -> SizingReport:
        value = loads(text, MAX_REPORT_BYTES)
        check_version(value, "report")
        return decode(cls, value, strict=False)

    def dumps(self) -> str:
        return dumps(self)


@document
class Percentiles:
    """In microseconds."""

    p50: int
    p90: int
    p99: int


@document
class Load:
    """A replica's current load, for autoscaling; 503 before Validated."""

    version: int
    kv_tokens: int = field("kvTokens")
    used_tokens: int
    evictable_tokens: int
    waiting_prompt_tokens: int
    running: int
    waiting: int
    refused_last60s: int  # sequences answered 429; older servers, without `retrying`: any 4xx
    max_running_requests: int
    draining: bool
    retrying: int | None = field(
        omit_none=True, default=None
    )  # distinct sequences that keep being answered 429
    # Running requests that the arrival rate needs in the long run (Little's law), in thousandths;
    # negative while a queue shrinks, absent while no sequence has ended.
    arriving_milli: int | None = field(low=-(2**53), omit_none=True, default=None)
    # Of the last minute; absent where no sequence had a token in it, and from older servers.
    time_to_first_token_us: Percentiles | None = field(omit_none=True, default=None)
    inter_token_latency_us: Percentiles | None = field(omit_none=True, default=None)

    @classmethod
    def parse(cls, text: str | bytes) -> Load:
        value = loads(text, MAX_LOAD_BYTES)
        check_version(value, "load")
        return decode(cls, value, strict=False)


def check_version(value: dict[str, Any], what: str) -> None:
    got = value.get("version")
    if isinstance(got, bool) or got not in READABLE_VERSIONS:
        known = ", ".join(map(str, READABLE_VERSIONS))
        raise ContractError(f"version: {what} of version {got!r:.20}, this operator reads {known}")
