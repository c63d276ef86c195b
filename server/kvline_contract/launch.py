"""Files that the operator writes for a pod: LaunchConfig at its start, GateFile and Records later.

launch.json never changes within a revision and is read strictly; gate.json and records.json are
re-read while the pod runs and tolerate unknown keys.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from hmac import compare_digest

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.memory import MemoryV1
from kvline_contract.report import MAX_GEMM_KERNELS, MAX_RANKS, Result, check_version

VERSION = 1
MAX_RECORDS = 16  # fingerprints per service
MAX_GATE_GPUS = 16  # GPU models in a gate file
MAX_LAUNCH_BYTES = 64 * 1024
MAX_TOKENS = 2**31 - 1


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class LoadFormat(StrEnum):
    WEIGHTS = "weights"
    RANDOM = "random"  # random weights from config.json alone: sizes a model before its download


class KVCacheDtype(StrEnum):
    AUTO = "auto"  # that of the model's computation
    FP8 = "fp8"  # e4m3, with a scale of each layer's keys and one of its values


class StateDtype(StrEnum):
    """Of the matrices in recurrent states; what a step computes is float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"  # of a gated delta rule alone (docs/decisions/060)


class Images(StrEnum):
    """Whether requests may have images; absent: text alone."""

    IF_SERVED = "IfServed"  # where the model has an encoder that this server runs on this device
    REQUIRED = "Required"


class Method(StrEnum):
    """Where draft tokens come from."""

    NGRAM = "NGram"  # the sequence's own text


class ToolCallParser(StrEnum):
    """How a model writes tool calls (kvline_server/formats)."""

    LLAMA3_JSON = "Llama3JSON"
    PYTHONIC = "Pythonic"
    HERMES = "Hermes"
    QWEN_XML = "QwenXML"
    MISTRAL_V7 = "MistralV7"
    MISTRAL_V11 = "MistralV11"
    PHI4_MINI = "Phi4Mini"
    GEMMA3 = "Gemma3"
    HARMONY = "Harmony"


class Reuse(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


@document
class Model:
    source: str = field(limit=512)
    path: str = field(limit=512)  # absolute, in the pod
    served_name: str = field(limit=253)
    load_format: LoadFormat = field(default=LoadFormat.WEIGHTS)

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ContractError(f"path: expected an absolute path, got {self.path[:80]!r}")


MAX_DRAFT_TOKENS = 7


@document
class Speculation:
    """Speculative decoding; None: the server's default."""

    method: Method
    max_draft_tokens: int | None = field(low=1, high=MAX_DRAFT_TOKENS, omit_none=True, default=None)
    # Of a model whose layers keep recurrent states: requests with all their draft tokens at once.
    max_sequences: int | None = field(low=1, high=4096, omit_none=True, default=None)

    @property
    def draft_tokens(self) -> int:
        """Of a sequence and step, at most. How many pay is measured while it serves."""
        return self.max_draft_tokens or MAX_DRAFT_TOKENS


MAX_IMAGES = 64  # of a request


@document
class EngineOptions:
    """Settings of the spec; None: the server's default."""

    max_model_len: int | None = field(low=16, high=MAX_TOKENS, omit_none=True, default=None)
    max_running_requests: int | None = field(low=1, high=4096, omit_none=True, default=None)
    max_prefill_tokens: int | None = field(low=16, high=65536, omit_none=True, default=None)
    max_top_logprobs: int | None = field(low=0, high=20, omit_none=True, default=None)
    kv_cache_dtype: KVCacheDtype | None = field(omit_none=True, default=None)
    speculation: Speculation | None = field(omit_none=True, default=None)
    default_max_tokens: int | None = field(low=1, high=MAX_TOKENS, omit_none=True, default=None)
    tool_call_parser: ToolCallParser | None = field(omit_none=True, default=None)
    # Recurrent states kept for prefixes, of a model that has layers with a state.
    prefix_snapshots: int | None = field(low=0, high=65536, omit_none=True, default=None)
    state_dtype: StateDtype | None = field(omit_none=True, default=None)  # of the same models
    images: Images | None = field(omit_none=True, default=None)
    max_images_per_request: int | None = field(low=1, high=MAX_IMAGES, omit_none=True, default=None)
    # Of an image once it is resized, which a larger one is to.
    max_image_patches: int | None = field(low=4, high=65536, omit_none=True, default=None)


MOST_SNAPSHOTS = 64  # of recurrent states, where the spec does not say


def usual_snapshots(requests: int) -> int:
    """Prefix snapshots beside so many running requests, by a simulation (docs/decisions/060)."""
    return min(2 * requests, MOST_SNAPSHOTS)


@document
class CapacityOptions:
    kv_tokens: int | None = field("kvTokens", low=16, omit_none=True, default=None)
    headroom_mib: int | None = field("headroomMiB", low=0, high=65536, omit_none=True, default=None)


@document
class LaunchConfig:
    version: int = field(low=1)
    namespace: str = field(limit=63)
    service: str = field(limit=63)
    revision: str = field(limit=16)
    image: str = field(limit=512)
    device: Device
    tensor_parallel: int = field(low=1, high=8)
    model: Model
    engine: EngineOptions
    capacity: CapacityOptions
    require_api_key: bool = field(default=False)
    # Seconds that requests may still take after SIGTERM; None: the server's default.
    drain_seconds: int | None = field(low=1, high=3600, omit_none=True, default=None)
    # Whether the API's port speaks TLS; absent where it does not, so that older servers read it.
    require_tls: bool | None = field(omit_none=True, default=None)
    # What the container has of the spec besides, and a size depends on.
    environment: dict[str, str] | None = field(items=16, limit=256, omit_none=True, default=None)
    cpu_limit: str | None = field(limit=24, omit_none=True, default=None)

    @classmethod
    def parse(cls, text: str | bytes) -> LaunchConfig:
        """Reads strictly: an unknown key means that the operator is newer than this image."""
        value = loads(text, MAX_LAUNCH_BYTES)
        if value.get("version") != VERSION:
            raise ContractError(
                f"version: this server reads launch version {VERSION}, got {value.get('version')!r}"
            )
        return decode(cls, value, strict=True)

    def dumps(self) -> str:
        return dumps(self)


@document
class GateFile:
    """Whether a validated pod may take traffic. Thresholds apply until it has been Ready once."""

    version: int
    open: bool
    min_kv_tokens: int = field("minKVTokens", default=0)
    # The smallest value of the map, for servers that do not read the map.
    required_kv_tokens: int = field("requiredKVTokens", default=0)
    required_by_gpu: dict[str, int] | None = field(
        "requiredByGPU", items=MAX_GATE_GPUS, omit_none=True, default=None
    )
    # Of the token in the operator's notices to pods; absent in files of earlier operators.
    token_sha256: str | None = field("tokenSHA256", limit=64, omit_none=True, default=None)
    # Slots of running sequences; it asks nothing of a model without recurrent states.
    required_sequences: int | None = field(omit_none=True, default=None)

    @classmethod
    def parse(cls, text: str | bytes) -> GateFile:
        value = loads(text, 4096)
        check_version(value, "gate file", (VERSION,))
        return decode(cls, value, strict=False)

    def knows(self, token: str) -> bool:
        """Whether a notice with this token comes from the operator that wrote the file."""
        presented = sha256(token.encode()).hexdigest()
        return compare_digest(presented.encode(), (self.token_sha256 or "").encode())

    def admits(self, result: Result, gpu: str = "") -> bool:
        """Whether a replica of this size reaches both thresholds."""
        slots, required = result.state_slots, self.required_sequences or 0
        enough = slots is None or slots >= required
        return enough and result.kv_tokens >= self.threshold(gpu)

    def threshold(self, gpu: str = "") -> int:
        """KV tokens that a replica on this GPU must have; `gpu` is its name in the report. For one
        that the map lacks: minKVTokens where it is set, else the smallest value of the map."""
        unknown = 0 if self.required_by_gpu and self.min_kv_tokens else self.required_kv_tokens
        required = (self.required_by_gpu or {}).get(gpu, unknown)
        return max(self.min_kv_tokens, required)


FREE_NOISE = 8  # MiB by which free memory differs between starts of the same container


@document
class Record:
    """A budget that an identical replica validated; it replaces the search, not the validation."""

    kv_tokens: int = field("kvTokens", low=1)
    free_mib: int = field("freeMiB")
    loop_ms: int
    measured_at: str = field(limit=32)
    memory: MemoryV1  # records of version 1 are read by every server and operator
    gemm_kernels: tuple[str, ...] = field(items=MAX_GEMM_KERNELS, limit=48, default=())
    # Of the replica; absent for one. `memory` is that of the binding rank.
    ranks: int | None = field(low=1, high=MAX_RANKS, omit_none=True, default=None)
    # As a Result's: the tokens are what these leave.
    state_slots: int | None = field(low=1, omit_none=True, default=None)
    snapshots: int | None = field(omit_none=True, default=None)
    state_dtype: str | None = field(limit=16, omit_none=True, default=None)

    def had_less_free_than(self, free_mib: int) -> bool:
        """Whether it was taken with less memory free, as beside another process."""
        return free_mib > self.free_mib + FREE_NOISE

    def like(self, ranks: int) -> bool:
        """Whether it is of a replica with as many ranks: others' sizes are not comparable."""
        return (self.ranks or 1) == ranks

    @classmethod
    def of(cls, result: Result) -> Record:
        return cls(
            kv_tokens=result.kv_tokens,
            free_mib=result.free_mib,
            loop_ms=result.loop_ms,
            measured_at=result.measured_at,
            memory=MemoryV1.of(result.memory),
            gemm_kernels=result.gemm_kernels,
            ranks=len(result.ranks) if len(result.ranks) > 1 else None,
            state_slots=result.state_slots,
            snapshots=result.snapshots,
            state_dtype=result.state_dtype,
        )


@document
class Records:
    version: int
    reuse: Reuse
    records: dict[str, Record] = field(items=MAX_RECORDS)

    @classmethod
    def parse(cls, text: str | bytes) -> Records:
        value = loads(text, 64 * 1024)
        check_version(value, "records", (VERSION,))
        return decode(cls, value, strict=False)
