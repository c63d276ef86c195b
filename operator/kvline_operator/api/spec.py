"""The body of an InferenceService to a frozen ServiceSpec.

The CRD's schema rejects most invalid specs; what it cannot check is a SpecError that names the
field. Reads `metadata` and `spec`, never `status`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from kvline_contract.codec import ContractError, camel, decode
from kvline_contract.launch import (
    EngineOptions,
    KVCacheDtype,
    Reuse,
    Speculation,
    StateDtype,
    ToolCallParser,
)
from kvline_contract.names import CPU_RANK, base_name
from kvline_operator.api import modalities, replicas_field
from kvline_operator.api.inputs import read
from kvline_operator.api.replicas_field import ReplicasField
from kvline_operator.api.source import ModelSource, source_of
from kvline_operator.errors import SpecError

# Fields that change pods and therefore make a revision; thresholds and replicas do not.
REVISION_FIELDS = (
    "model",
    "engine",
    "resources",
    "scheduling",
    "access",
    "drainSeconds",
    "startupSeconds",
    "imagePullSecrets",
    "serviceAccountName",
    "env",
    "podMetadata",
    "restartedAt",
)
REVISION_CAPACITY_FIELDS = ("kvTokens", "headroomMiB")
# Fields of spec.rollout that ask for an act, and are no policy that a candidate is tried under.
ACTS = ("paused", "promote")
# Annotations that asked earlier operators for an act, and the field that does so now.
EARLIER_ACTS = {
    "kvline.dev/paused": "spec.rollout.paused",
    "kvline.dev/promote": "spec.rollout.promote",
    "kvline.dev/restart": "spec.restartedAt",
    "kvline.dev/upgrade": "spec.upgradePolicy",
}
# One is in launch.json alone, of spec.engine.modalities.
ENGINE_FIELDS = {camel(field.name) for field in fields(EngineOptions)} - {"images"} | {"modalities"}
ENGINE_CHOICES: dict[str, type[StrEnum]] = {
    "kvCacheDtype": KVCacheDtype,
    "stateDtype": StateDtype,
    "toolCallParser": ToolCallParser,
}


Choice = TypeVar("Choice", bound=StrEnum)


class Strategy(StrEnum):
    SURGE = "Surge"
    REPLACE = "Replace"
    RECREATE = "Recreate"


class OnFailure(StrEnum):
    ROLLBACK = "Rollback"
    HOLD = "Hold"


class UpgradePolicy(StrEnum):
    """Which image a spec without spec.image gets."""

    PINNED = "Pinned"  # the stable revision's
    LATEST = "Latest"  # the operator's default image


@dataclass(frozen=True, slots=True)
class Rollout:
    """spec.rollout; a change restarts no pod."""

    strategy: Strategy = Strategy.SURGE
    min_capacity_percent: int = 95
    progress_deadline_seconds: int = 1800
    on_failure: OnFailure = OnFailure.ROLLBACK
    promote: str = ""  # a revision
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """spec.autoscaling."""

    max_replicas: int
    min_replicas: int = 1
    target_percent: int = 70
    scale_down_delay_seconds: int = 300
    scale_up_percent: int = 100  # of the replicas, in a minute


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    namespace: str
    name: str
    uid: str
    generation: int
    base: str
    image: str | None
    upgrade_policy: UpgradePolicy
    source: ModelSource
    served_name: str
    replicas: int
    min_kv_tokens: int
    min_sequences: int
    reuse: Reuse
    rollout: Rollout
    autoscaling: Autoscaling | None
    policy: str  # digest of spec.rollout and spec.capacity
    inputs_json: str  # canonical JSON of the fields that make a revision
    replicas_field: ReplicasField  # with spec.autoscaling `replicas` is not it
    earlier_acts: tuple[str, ...] = ()  # annotations of EARLIER_ACTS

    @property
    def inputs(self) -> dict[str, Any]:
        """A fresh copy of the revision's inputs."""
        return dict(json.loads(self.inputs_json))

    @property
    def scheme(self) -> str:
        return scheme(self.inputs)

    @property
    def gpus(self) -> int:
        return gpus(self.inputs.get("resources", {}))

    @property
    def device_class(self) -> str:
        return device_class(self.inputs.get("resources", {}))


def parse(body: dict[str, Any]) -> ServiceSpec:
    metadata, spec = body["metadata"], body.get("spec") or {}
    made, capacity = read(inputs(_checked(spec))), spec.get("capacity") or {}
    model = made.get("model", {})
    return ServiceSpec(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        base=base_name(metadata["name"]),
        image=spec.get("image"),
        upgrade_policy=_choice(
            UpgradePolicy, spec.get("upgradePolicy", UpgradePolicy.PINNED), "upgradePolicy"
        ),
        source=source_of(model),
        served_name=model.get("servedName") or metadata["name"],
        replicas=spec.get("replicas", 1),
        min_kv_tokens=capacity.get("minKVTokens", 0),
        min_sequences=capacity.get("minSequences", 0),
        reuse=_choice(Reuse, capacity.get("reuse", Reuse.AUTO), "capacity.reuse"),
        rollout=_rollout(spec),
        autoscaling=_autoscaling(spec),
        policy=_policy(spec),
        inputs_json=canonical(made),
        replicas_field=replicas_field.read(body),
        earlier_acts=tuple(k for k in EARLIER_ACTS if k in (metadata.get("annotations") or {})),
    )


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    """A field that a newer CRD lets pass must not be dropped in silence: pods would have another
    setting than their revision."""
    engine = spec.get("engine") or {}
    for key in sorted(set(engine) - ENGINE_FIELDS):
        raise SpecError(f"spec.engine.{key}: this operator does not know it; upgrade the operator")
    for field, kind in ENGINE_CHOICES.items():
        if field in engine:
            _choice(kind, engine[field], f"engine.{field}")
    if "speculation" in engine:
        speculation(engine)
    modalities.check(engine)
    return spec


def speculation(engine: dict[str, Any]) -> Speculation:
    """That of spec.engine, which has one. Raises SpecError."""
    path = "spec.engine.speculation"
    try:
        return decode(Speculation, engine["speculation"], strict=True, path=path)
    except ContractError as error:
        raise SpecError(str(error)) from None


def _choice(kind: type[Choice], value: Any, field: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(kind)
        raise SpecError(f"spec.{field} must be {known}, got {value!r:.80}") from None


def _rollout(spec: dict[str, Any]) -> Rollout:
    rollout, default = spec.get("rollout") or {}, Rollout()
    strategy = rollout.get("strategy", default.strategy)
    on_failure = rollout.get("onFailure", default.on_failure)
    return Rollout(
        strategy=_choice(Strategy, strategy, "rollout.strategy"),
        min_capacity_percent=rollout.get("minCapacityPercent", default.min_capacity_percent),
        progress_deadline_seconds=rollout.get(
            "progressDeadlineSeconds", default.progress_deadline_seconds
        ),
        on_failure=_choice(OnFailure, on_failure, "rollout.onFailure"),
        promote=rollout.get("promote", default.promote),
        paused=rollout.get("paused", default.paused),
    )


def _policy(spec: dict[str, Any]) -> str:
    """Without defaults, so that an operator with more fields computes the same digest; without
    acts, so that a pause does not try an expired candidate again."""
    rollout = {k: v for k, v in (spec.get("rollout") or {}).items() if k not in ACTS}
    text = canonical([rollout, spec.get("capacity") or {}])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _autoscaling(spec: dict[str, Any]) -> Autoscaling | None:
    given = spec.get("autoscaling")
    if not given:
        return None
    default = Autoscaling(given["maxReplicas"])
    return Autoscaling(
        max_replicas=given["maxReplicas"],
        min_replicas=given.get("minReplicas", default.min_replicas),
        target_percent=given.get("targetPercent", default.target_percent),
        scale_down_delay_seconds=given.get(
            "scaleDownDelaySeconds", default.scale_down_delay_seconds
        ),
        scale_up_percent=given.get("scaleUpPercent", default.scale_up_percent),
    )


def scheme(inputs: dict[str, Any]) -> str:
    """Of the API of a revision with these inputs."""
    return "https" if "tlsSecretRef" in inputs.get("access", {}) else "http"


def gpus(resources: dict[str, Any]) -> int:
    """Per replica; CPU ranks are none."""
    return 0 if resources.get("gpuResource") == CPU_RANK else int(resources.get("gpus", 0))


def ranks(resources: dict[str, Any]) -> int:
    """Processes that share the model of a replica, each with a GPU of its own or on the CPU."""
    return max(1, int(resources.get("gpus", 0)))


def device_class(resources: dict[str, Any]) -> str:
    """Of the GPUs, which a ResourceClaim then allocates; empty without GPUs, or where they are an
    extended resource."""
    return str(resources.get("gpuDeviceClass", "")) if resources.get("gpus") else ""


def inputs(spec: dict[str, Any]) -> dict[str, Any]:
    """The fields that make a revision. Absent fields stay absent."""
    out: dict[str, Any] = {key: spec[key] for key in REVISION_FIELDS if spec.get(key)}
    capacity = spec.get("capacity") or {}
    pinned = {key: capacity[key] for key in REVISION_CAPACITY_FIELDS if key in capacity}
    if pinned:
        out["capacity"] = pinned
    return out


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
