"""Read: the child objects of a service and the reports of its pods, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvline_contract import times
from kvline_contract.codec import ContractError
from kvline_contract.names import (
    DOWNLOAD_CONTAINER,
    LABEL_PREPARES,
    LABEL_REVISION,
    LABEL_SERVICE,
    SERVER_CONTAINER,
)
from kvline_contract.report import Load, Result, SizingReport, State, Termination
from kvline_operator.ended_pods import EndedPod, ended, has_ended
from kvline_operator.errors import Missing, SpecError
from kvline_operator.gate import Measured
from kvline_operator.kube import Kube
from kvline_operator.pod_ownership import PodOwnership
from kvline_operator.rollout import DeploymentState
from kvline_operator.sizing import Reading, Reports
from kvline_operator.spec import ServiceSpec

Object = dict[str, Any]
Waits = tuple[tuple[str, str], ...]  # revision and address of pods whose preStop wait serves nobody
UNSERVED = (
    "spec.resources.gpuDeviceClass needs the API resource.k8s.io/v1 (Kubernetes 1.34 or newer), "
    "which this API server does not serve; remove the field to request nvidia.com/gpu, or set "
    "spec.resources.gpuResource"
)
# Of the scheduler's messages: an extended resource, and devices of a ResourceClaim.
SHORTAGES = ("Insufficient ", "cannot allocate all claims")
KILLS = (0, 137, 143)  # exit codes after SIGTERM, SIGKILL, and SIGTERM before the server started


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


@dataclass(frozen=True, slots=True)
class Observed:
    revisions: list[Object]  # ControllerRevisions
    deployments: list[Object]
    config_maps: list[Object]
    pods: tuple[PodView, ...]
    ended: tuple[EndedPod, ...] = ()  # terminal pods, newest first
    jobs: tuple[Object, ...] = ()  # prepare Jobs, also those being deleted
    preparing: tuple[PodView, ...] = ()  # their pods, oldest first
    claim_templates: tuple[Object, ...] = ()  # ResourceClaimTemplates
    needless: Waits = ()

    def config_map(self, name: str) -> Object | None:
        return self.child("ConfigMap", name)

    def child(self, kind: str, name: str) -> Object | None:
        """A child object of the service that the lists contain."""
        found = (c for c in self._listed().get(kind, []) if c["metadata"]["name"] == name)
        return next(found, None)

    def lists(self, kind: str) -> bool:
        """Whether children of this kind are listed: an unlisted one is most likely absent."""
        return kind in self._listed()

    def _listed(self) -> dict[str, Sequence[Object]]:
        return {
            "ControllerRevision": self.revisions,
            "Deployment": self.deployments,
            "ConfigMap": self.config_maps,
            "ResourceClaimTemplate": self.claim_templates,
        }

    def serving(self) -> dict[str, tuple[Measured, ...]]:
        """The sizes of ready replicas, by revision."""
        out: dict[str, tuple[Measured, ...]] = {}
        for pod in self.pods:
            if pod.ready and pod.measured is not None:
                out[pod.revision] = (*out.get(pod.revision, ()), pod.measured)
        return out

    def refused(self, revision: str) -> str:
        """Why the API server refuses a revision's pods, such as an unknown priority class; empty
        where it does not."""
        for item in self.deployments:
            if item["metadata"]["labels"].get(LABEL_REVISION) == revision:
                failure = condition_of(item.get("status") or {}, "ReplicaFailure")
                return str(failure.get("message", "")) if failure.get("status") == "True" else ""
        return ""

    def deployment_states(self) -> tuple[DeploymentState, ...]:
        return tuple(
            DeploymentState(
                revision=d["metadata"]["labels"].get(LABEL_REVISION, ""),
                replicas=d["spec"].get("replicas", 1),
                ready=(d.get("status") or {}).get("readyReplicas", 0),
            )
            for d in self.deployments
        )


def observe(
    kube: Kube, spec: ServiceSpec, reports: Reports, pool: ThreadPoolExecutor, lineage: PodOwnership
) -> Observed:
    """All children of a service, its pods' sizing reports, and their load if it autoscales."""
    namespace, selector = spec.namespace, f"{LABEL_SERVICE}={spec.base}"
    kinds = ("ControllerRevision", "Deployment", "ConfigMap", "Pod", "Job")
    lists = list(pool.map(lambda kind: kube.select(kind, namespace, selector), kinds))
    revisions, deployments, config_maps = (_owned(items, spec.uid) for items in lists[:3])
    found = lineage.ours(lists[3], spec.uid, {d["metadata"]["uid"] for d in deployments})
    ours = [p for p in found if not p["metadata"].get("deletionTimestamp")]
    living = [p for p in ours if not has_ended(p)]
    readings = list(pool.map(lambda pod: _read_report(pod, reports), living))
    views = [view(pod, reading) for pod, reading in zip(living, readings, strict=True)]
    now = times.now()
    leaves = leaving(found, deployments, now)
    pods = tuple(_awaiting(pod, leaves) for pod in views)
    if spec.autoscaling is not None:
        pods = tuple(pool.map(partial(_with_load, reports), pods))
    jobs = tuple(item for item in lists[4] if _is_owned(item, spec.uid))
    preparing = _preparing(kube, spec, jobs) if jobs else ()
    return Observed(
        revisions=revisions,
        deployments=deployments,
        config_maps=config_maps,
        pods=pods,
        ended=ended(ours),
        jobs=jobs,
        preparing=preparing,
        claim_templates=_claim_templates(kube, spec, selector, revisions),
        needless=needless_waits(pods, found, now),
    )


def _claim_templates(
    kube: Kube, spec: ServiceSpec, selector: str, revisions: list[Object]
) -> tuple[Object, ...]:
    """Listed only for services with spec.resources.gpuDeviceClass, now or in an earlier revision:
    API servers before 1.34 lack the kind."""
    if not spec.device_class and not any("claimTemplate" in r["data"] for r in revisions):
        return ()
    try:
        found = kube.select("ResourceClaimTemplate", spec.namespace, selector)
    except Missing:
        if spec.device_class:
            raise SpecError(UNSERVED) from None
        return ()
    return tuple(_owned(found, spec.uid))


def leaving(pods: list[Object], deployments: list[Object], now: str) -> str:
    """The name of a pod that leaves its node: terminating within its grace period, whose end
    deletionTimestamp is (a later one may be stuck), or one of a Deployment that wants fewer."""
    surplus: Counter[str] = Counter()  # by revision: placed pods above the wanted ones
    for item in deployments:
        surplus[_revision(item)] -= item["spec"].get("replicas", 1)
    placed = [p for p in pods if (p.get("spec") or {}).get("nodeName") and not has_ended(p)]
    for pod in placed:
        ends = pod["metadata"].get("deletionTimestamp")
        surplus[_revision(pod)] += not ends
        if ends and ends > now:
            return str(pod["metadata"]["name"])
    found = (p for p in placed if not p["metadata"].get("deletionTimestamp"))
    return next((str(p["metadata"]["name"]) for p in found if surplus[_revision(p)] > 0), "")


def needless_waits(pods: tuple[PodView, ...], found: list[Object], now: str) -> Waits:
    """Of terminating pods that wait for their clients (preStop) while another pod of the service
    lacks what they hold, such as the only GPU. As long as a replica is ready, or the lack is of
    something else, their wait does serve."""
    lacking = any(p.awaits and any(s in p.unschedulable for s in SHORTAGES) for p in pods)
    if not lacking or any(p.ready for p in pods):
        return ()
    terminating = (p for p in found if (p["metadata"].get("deletionTimestamp") or "") > now)
    living = [p for p in terminating if not has_ended(p)]
    waits = [(_revision(p), (p.get("status") or {}).get("podIP")) for p in living]
    return tuple(sorted((revision, address) for revision, address in waits if address))


def _revision(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(LABEL_REVISION, ""))


def _awaiting(pod: PodView, leaves: str) -> PodView:
    """A pod without a node is no failure while another of the service leaves one: in Recreate and
    Replace it gets what that one had."""
    return replace(pod, awaits=leaves) if pod.unschedulable else pod


def _preparing(kube: Kube, spec: ServiceSpec, jobs: tuple[Object, ...]) -> tuple[PodView, ...]:
    found = kube.select("Pod", spec.namespace, f"{LABEL_PREPARES}={spec.base}")
    uids = [job["metadata"]["uid"] for job in jobs]
    ours = [p for p in found if any(_is_owned(p, uid) for uid in uids)]
    views = [view(_with_download(pod), Reading(None)) for pod in ours]
    return tuple(sorted(views, key=lambda p: (p.created, p.name)))


def _with_download(pod: Object) -> Object:
    """A Job's pod downloads in its only container, a service's pod in an init container."""
    status = pod.get("status") or {}
    return {**pod, "status": {"initContainerStatuses": status.get("containerStatuses"), **status}}


def _owned(items: list[Object], uid: str) -> list[Object]:
    """Without foreign objects that have our labels, and those being deleted."""
    living = (item for item in items if not item["metadata"].get("deletionTimestamp"))
    return [item for item in living if _is_owned(item, uid)]


def _is_owned(item: Object, uid: str) -> bool:
    return any(o.get("uid") == uid for o in item["metadata"].get("ownerReferences") or [])


def _read_report(pod: Object, reports: Reports) -> Reading:
    status = pod.get("status") or {}
    address = status.get("podIP")
    container = _container(status.get("containerStatuses"), SERVER_CONTAINER)
    if not address or "running" not in (container.get("state") or {}):
        return Reading(None)
    return reports.read(pod["metadata"]["uid"], address, _is_ready(status))


def _with_load(reports: Reports, pod: PodView) -> PodView:
    if not (pod.ready and pod.address):
        return pod
    return replace(pod, load=reports.load(pod.uid, pod.address))


def view(pod: Object, reading: Reading) -> PodView:
    status = pod.get("status") or {}
    server = _container(status.get("containerStatuses"), SERVER_CONTAINER)
    download = _container(status.get("initContainerStatuses"), DOWNLOAD_CONTAINER)
    waiting = (server.get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in (None, "PodInitializing"):
        waiting = (download.get("state") or {}).get("waiting") or waiting
    return PodView(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        node=(pod.get("spec") or {}).get("nodeName", ""),
        revision=_revision(pod),
        ready=_is_ready(status),
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


def _container(statuses: list[Object] | None, name: str) -> Object:
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


def _is_ready(status: Object) -> bool:
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
