"""A pod as status and gate depend on it, from its status and its sizing report. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.names import DOWNLOAD_CONTAINER, LABEL_REVISION, SERVER_CONTAINER
from kvline_contract.report import Load, Result, SizingReport, State, Termination
from kvline_operator.observe.reports import Reading

Object = dict[str, Any]
KILLS = (0, 137, 143)  # exit codes after SIGTERM, SIGKILL, and SIGTERM before the server started


@dataclass(frozen=True, slots=True)
class Measured:
    """A replica's validated size."""

    gpu: str  # GPU model; empty on a CPU
    tokens: int
    bytes_per_token: int


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
        return self.code in KILLS and not self.oom_killed

    @property
    def killed_text(self) -> str:
        return (
            f"the container was killed (code {self.code}) by the kubelet or its node, which does "
            "not count against its revision; see the events of the pod"
        )


@dataclass(frozen=True, slots=True)
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
    unmounted_since: str = ""  # RFC 3339; empty where its volumes and network are set up
    address: str = ""

    @property
    def validated(self) -> bool:
        return self.report is not None and self.report.state is State.VALIDATED

    @property
    def end_number(self) -> int:
        """Number of its server container's last termination, from 1, for any reason."""
        return self.restarts + (0 if self.running else 1)

    @property
    def failed(self) -> Ended | None:
        """Its last termination, unless it has been validated since."""
        return self.ended if self.ended and not self.validated else None

    @property
    def killed(self) -> Ended | None:
        """Its last termination, if that was an external kill and it does not run again yet."""
        failed = self.failed
        return failed if failed and failed.from_outside and not self.running else None

    @property
    def measured(self) -> Measured | None:
        """The validated size, as input of the gate."""
        if self.report is None or self.result is None:
            return None
        gpu = self.report.provenance.gpu if self.report.provenance is not None else ""
        return Measured(gpu, self.result.kv_tokens, self.result.bytes_per_token)

    @property
    def result(self) -> Result | None:
        return self.report.result if self.report is not None else None

    @property
    def kv_tokens(self) -> int | None:
        return self.result.kv_tokens if self.result is not None else None


def view(pod: Object, reading: Reading) -> PodView:
    status = pod.get("status") or {}
    server = container(status.get("containerStatuses"), SERVER_CONTAINER)
    download = container(status.get("initContainerStatuses"), DOWNLOAD_CONTAINER)
    waiting = (server.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "PodInitializing"):
        waiting = (download.get("state") or {}).get("waiting") or waiting
    return PodView(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        node=(pod.get("spec") or {}).get("nodeName", ""),
        revision=revision_of(pod),
        ready=is_ready(status),
        running="running" in (server.get("state") or {}),
        downloading="running" in (download.get("state") or {}),
        restarts=server.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        unschedulable=_unschedulable(status),
        ended=_ended(server),
        download_ended=_ended(download),
        report=reading.report,
        report_error=reading.error,
        report_invalid=reading.invalid,
        created=pod["metadata"].get("creationTimestamp", ""),
        ready_since=condition_of(status, "Ready").get("lastTransitionTime") or "",
        unmounted_since=_unmounted_since(status),
        address=status.get("podIP") or "",
    )


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


def _unmounted_since(status: Object) -> str:
    """RFC 3339; empty where a pod's volumes and network are there, or its kubelet does not tell."""
    found = condition_of(status, "PodReadyToStartContainers")
    return str(found.get("lastTransitionTime") or "") if found.get("status") == "False" else ""


def _unschedulable(status: Object) -> str:
    scheduled = condition_of(status, "PodScheduled")
    if scheduled.get("reason") != "Unschedulable":
        return ""
    return str(scheduled.get("message") or "no node fits")


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
                message=termination.message if termination else message[:512],
            )
    return None


def revision_of(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(LABEL_REVISION, ""))
