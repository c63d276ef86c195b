"""A pod as status and gate depend on it, from its status and its sizing report. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.exits import meaning
from kvline_contract.load import Load
from kvline_contract.names import DOWNLOAD_CONTAINER, SERVER_CONTAINER, revision_of
from kvline_contract.report import Knob, Result, SizingReport, State, Termination
from kvline_operator.observe.reports import Reading
from kvline_operator.observe.slots import Slots

Object = dict[str, Any]
KILLS = (0, 137, 143)  # exit codes after SIGTERM, SIGKILL, and SIGTERM before the server started
LOST = ("ContainerStatusUnknown", "Unknown")  # reasons of a container that its node lost
# Of the container runtime and the kernel; the server exits with none of them.
NOT_STARTED = (126, 127, 128, 255)
NOT_STARTED_REASONS = ("StartError", "ContainerCannotRun")
WRONG_ARCHITECTURE = "exec format error"
SET_UP_SECONDS = 120.0  # for volumes and network; a claim may be attached to another node
FRESH_SECONDS = 60.0
CLAUSE = re.compile("[:;] ")  # what ends one in a message of the server


@dataclass(frozen=True, slots=True)
class Measured:
    """A replica's validated size."""

    gpu: str  # GPU model; empty on a CPU
    tokens: int
    bytes_per_token: int  # Result.compared_bytes
    slots: Slots | None = None  # of a model whose layers keep recurrent states
    # MiB of its encoder of images, by part
    encoder: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """The last termination of a container."""

    code: int
    reason: str  # set by Kubernetes, such as OOMKilled
    termination: Termination | None
    message: str

    @property
    def oom_killed(self) -> bool:
        return self.code == 137 and self.reason == "OOMKilled"

    @property
    def from_outside(self) -> bool:
        """An external kill of the server: by the kubelet (a probe) or the node (a shutdown)."""
        return self.reason in LOST or (self.code in KILLS and not self.oom_killed)

    @property
    def not_started(self) -> bool:
        """The node could not run the image's program."""
        if self.from_outside or self.termination is not None:
            return False
        known = self.code in NOT_STARTED or self.reason in NOT_STARTED_REASONS
        return known or self.message.rstrip().endswith(WRONG_ARCHITECTURE)

    @property
    def of_engine(self) -> bool:
        """Whether it counts against its revision."""
        if self.oom_killed:
            return True
        return not (self.from_outside or self.not_started) and meaning(self.code).rejects

    @property
    def title(self) -> str:
        """For messages: the contract's name of its code, else Kubernetes' reason."""
        return self.reason if self.oom_killed or self.not_started else meaning(self.code).title

    @property
    def headline(self) -> str:
        """The message in short: one with the memory by part is its first clause and the fields
        that would help."""
        found = self.termination
        if found is None or found.memory is None:
            return self.message
        each = (f"{_change(k)}{' and ' if k.with_next else ' or '}" for k in found.knobs)
        helps = "".join(each).removesuffix(" or ")
        return CLAUSE.split(self.message)[0] + (f"; {helps}" if helps else "")

    @property
    def killed_text(self) -> str:
        return (
            f"the container was killed (code {self.code}) by the kubelet or its node, which does "
            "not count against its revision; see the events of the pod"
        )


@dataclass(frozen=True)  # no slots: what is derived is kept
class PodView:
    """A pod that is not terminal, as far as status and gate depend on it."""

    name: str
    uid: str
    node: str
    revision: str
    ready: bool
    running: bool  # the server container runs
    downloading: bool
    restarts: int
    waiting_reason: str  # of the server or download container, set by Kubernetes
    waiting_message: str
    unschedulable: str  # the scheduler's message; empty where it has a node
    ended: Ended | None  # last termination of the server container
    download_ended: Ended | None
    report: SizingReport | None
    report_error: str
    report_invalid: bool
    created: str = ""  # RFC 3339
    ready_since: str = ""  # RFC 3339, while it is ready
    awaits: str = ""  # where it has no node: a pod of the service that leaves one
    failures: int = 0  # terminations that count against its revision; candidate.counted
    oom_kills: int = 0
    load: Load | None = None  # of ready pods of services with spec.autoscaling
    not_set_up: bool = False  # its volumes or network, for long
    node_silent: bool = False  # its kubelet does not report
    fresh: bool = False  # its container has run for less than a minute
    address: str = ""
    namespace: str = ""
    gates: tuple[str, ...] = ()  # scheduling gates, such as Kueue's, that keep it from a node
    secrets: tuple[str, ...] = ()  # names of those that it reads
    claims: tuple[str, ...] = ()  # names of those that it mounts
    memory: str = ""  # its server's limit
    download_memory: str = ""  # its download's limit
    on_gpu: bool = False

    @cached_property
    def validated(self) -> bool:
        return self.report is not None and self.report.state is State.VALIDATED

    @cached_property
    def end_number(self) -> int:
        """Number of its server container's last termination, from 1, for any reason."""
        return self.restarts + (0 if self.running else 1)

    @cached_property
    def failed(self) -> Ended | None:
        """Its last termination, unless it has been validated since."""
        return self.ended if self.ended and not self.validated else None

    @cached_property
    def measured(self) -> Measured | None:
        """The validated size, as input of the gate."""
        if self.report is None or self.result is None:
            return None
        gpu = self.report.provenance.gpu if self.report.provenance is not None else ""
        result = self.result
        figures = gpu, result.kv_tokens, result.compared_bytes
        return Measured(*figures, Slots.of(result), result.memory.encoder())

    @cached_property
    def result(self) -> Result | None:
        return self.report.result if self.report is not None else None

    @cached_property
    def kv_tokens(self) -> int | None:
        return self.result.kv_tokens if self.result is not None else None


def view(pod: Object, reading: Reading, now: str = "") -> PodView:
    """`now`: RFC 3339; without it no time has passed."""
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    server = container(status.get("containerStatuses"), SERVER_CONTAINER)
    download = container(status.get("initContainerStatuses"), DOWNLOAD_CONTAINER)
    waiting = (server.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "PodInitializing"):
        waiting = (download.get("state") or {}).get("waiting") or waiting
    scheduled = condition_of(status, "PodScheduled")
    asked = container(spec.get("containers"), SERVER_CONTAINER).get("resources") or {}
    loads = container(spec.get("initContainers"), DOWNLOAD_CONTAINER).get("resources") or {}
    limits = asked.get("limits") or {}
    return PodView(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        node=spec.get("nodeName", ""),
        revision=revision_of(pod),
        ready=is_ready(status),
        running="running" in (server.get("state") or {}),
        downloading="running" in (download.get("state") or {}),
        restarts=server.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        unschedulable=_unschedulable(scheduled),
        ended=_ended(server),
        download_ended=_ended(download),
        report=reading.report,
        report_error=reading.error,
        report_invalid=reading.invalid,
        created=pod["metadata"].get("creationTimestamp", ""),
        ready_since=condition_of(status, "Ready").get("lastTransitionTime") or "",
        not_set_up=_seconds(_not_set_up_since(status), now) > SET_UP_SECONDS,
        node_silent=_node_is_silent(spec, status),
        fresh=_is_fresh(server, now) or _is_fresh(download, now),
        address=status.get("podIP") or "",
        namespace=pod["metadata"].get("namespace", ""),
        gates=_gates(spec, scheduled),
        secrets=_secrets(spec),
        claims=_claims(spec),
        memory=memory_limit(spec),
        download_memory=str((loads.get("limits") or {}).get("memory", "")),
        # Of extended resources a pod of ours has GPUs alone; a claim is for GPUs, too.
        on_gpu=bool(asked.get("claims")) or any("/" in name for name in limits),
    )


def _change(knob: Knob) -> str:
    unit = "Mi" if knob.spec_field.endswith(".memory") else ""
    to = "" if knob.value is None else f" to {knob.value}{unit}"
    return f"{knob.direction} {knob.spec_field}{to}"


def memory_limit(spec: Object) -> str:
    """The server's, in the spec of a pod or of its template; empty for none."""
    resources = container(spec.get("containers"), SERVER_CONTAINER).get("resources") or {}
    return str((resources.get("limits") or {}).get("memory", ""))


def container(statuses: list[Object] | None, name: str) -> Object:
    for item in statuses or []:
        if item.get("name") == name:
            return item
    return {}


def condition_of(status: Object, kind: str) -> Object:
    """A condition of any object's status; empty where it has none of that type."""
    for item in status.get("conditions") or []:
        if item.get("type") == kind:
            return dict(item)
    return {}


def is_ready(status: Object) -> bool:
    return condition_of(status, "Ready").get("status") == "True"


def _not_set_up_since(status: Object) -> str:
    """RFC 3339; empty where a pod's volumes and network are there, or its kubelet does not tell."""
    found = condition_of(status, "PodReadyToStartContainers")
    return str(found.get("lastTransitionTime") or "") if found.get("status") == "False" else ""


def _node_is_silent(spec: Object, status: Object) -> bool:
    """Kubernetes makes a pod of such a node unready, and leaves the condition of its containers."""
    if spec.get("readinessGates") or is_ready(status):
        return False
    return condition_of(status, "ContainersReady").get("status") == "True"


def _is_fresh(status: Object, now: str) -> bool:
    running = (status.get("state") or {}).get("running")
    return running is not None and _seconds(running.get("startedAt", ""), now) < FRESH_SECONDS


def _seconds(since: str, now: str) -> float:
    """0 where one of the two times is not known."""
    if not (since and now):
        return 0.0
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()


def _unschedulable(scheduled: Object) -> str:
    if scheduled.get("reason") != "Unschedulable":
        return ""
    return str(scheduled.get("message") or "no node fits")


def _gates(spec: Object, scheduled: Object) -> tuple[str, ...]:
    if scheduled.get("reason") != "SchedulingGated":
        return ()
    return tuple(gate["name"] for gate in spec.get("schedulingGates") or []) or ("unknown",)


def _secrets(spec: Object) -> tuple[str, ...]:
    volumes = (v.get("secret", {}).get("secretName") for v in spec.get("volumes") or [])
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    sources = (e.get("valueFrom") or {} for c in containers for e in c.get("env") or [])
    variables = (source.get("secretKeyRef", {}).get("name") for source in sources)
    return tuple(sorted({name for name in (*volumes, *variables) if name}))


def _claims(spec: Object) -> tuple[str, ...]:
    volumes = (v.get("persistentVolumeClaim") or {} for v in spec.get("volumes") or [])
    return tuple(sorted({claim["claimName"] for claim in volumes if claim}))


def _ended(container: Object) -> Ended | None:
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated")
        if ended:
            message = ended.get("message") or ""
            try:
                termination = Termination.parse(message)
            except ContractError:
                termination = None
            return Ended(
                code=ended.get("exitCode", 0),
                reason=ended.get("reason", ""),
                termination=termination,
                message=termination.message if termination else message[-512:],
            )
    return None
