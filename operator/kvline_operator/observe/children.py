"""The child objects of a service and the reports of its pods, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvline_contract import times
from kvline_contract.names import (
    KIND,
    LABEL_PREPARES,
    LABEL_SERVICE,
    SERVER_CONTAINER,
    revision_of,
)
from kvline_operator.api.spec import ServiceSpec
from kvline_operator.errors import Gone, Missing, SpecError
from kvline_operator.kube import Kube
from kvline_operator.observe.earlier_group import released
from kvline_operator.observe.ended_pods import EndedPod, ended, has_ended
from kvline_operator.observe.ownership import PodOwnership, Service, is_owned, living
from kvline_operator.observe.pods import (
    Measured,
    PodView,
    condition_of,
    container,
    is_ready,
    view,
)
from kvline_operator.observe.reports import Reading, Reports

Object = dict[str, Any]
SINGLES = ("ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget")
Waits = tuple[tuple[str, str], ...]  # revision and address of pods whose preStop wait serves nobody
UNSERVED = (
    "spec.resources.gpuDeviceClass needs the API resource.k8s.io/v1 (Kubernetes 1.34 or newer), "
    "which this API server does not serve; remove the field to request nvidia.com/gpu, or set "
    "spec.resources.gpuResource"
)
# Of the scheduler's messages: a resource, pods of a node, devices of a ResourceClaim.
SHORTAGES = ("Insufficient ", "Too many pods", "cannot allocate all claims")
# And of what else another pod keeps from it: a claim for one pod, a rule of its affinity.
KEPT_AWAY = (*SHORTAGES, "ReadWriteOncePod", "pod anti-affinity", "topology spread constraints")


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A revision's Deployment as observed."""

    revision: str
    replicas: int
    ready: int


@dataclass(frozen=True)  # no slots: what is derived is kept
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
    singles: tuple[Object, ...] = ()  # children of which a service has one, ours or not

    def config_map(self, name: str) -> Object | None:
        return self.listed["ConfigMap"].get(name)

    @cached_property
    def listed(self) -> dict[str, dict[str, Object]]:
        """Children by kind and name. One of these kinds that is missing is most likely absent."""
        kinds: dict[str, Sequence[Object]] = {
            "ControllerRevision": self.revisions,
            "Deployment": self.deployments,
            "ConfigMap": self.config_maps,
            "ResourceClaimTemplate": self.claim_templates,
        }
        kinds |= {kind: [s for s in self.singles if s["kind"] == kind] for kind in SINGLES}
        return {k: {c["metadata"]["name"]: c for c in items} for k, items in kinds.items()}

    def serving(self) -> dict[str, tuple[Measured, ...]]:
        """The sizes of ready replicas, by revision."""
        out: dict[str, tuple[Measured, ...]] = {}
        for pod in self.pods:
            if pod.ready and pod.measured is not None:
                out[pod.revision] = (*out.get(pod.revision, ()), pod.measured)
        return out

    def unread(self) -> frozenset[str]:
        """Revisions of ready replicas whose size is not known (yet), as after a start."""
        return frozenset(p.revision for p in self.pods if p.ready and p.measured is None)

    def refused(self, revision: str) -> str:
        """Why the API server refuses a revision's pods, such as an unknown priority class; empty
        where it does not."""
        failure = condition_of(self.deployment_status(revision), "ReplicaFailure")
        return str(failure.get("message", "")) if failure.get("status") == "True" else ""

    def deployment_status(self, revision: str) -> Object:
        """Of a revision's Deployment; empty where there is none."""
        found = (d.get("status") for d in self.deployments if revision_of(d) == revision)
        return next(found, None) or {}

    @cached_property
    def deployment_states(self) -> tuple[DeploymentState, ...]:
        return tuple(
            DeploymentState(
                revision=revision_of(d),
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
    found_by_kind = pool.map(lambda kind: kube.select(kind, namespace, selector), kinds)
    singles = pool.map(lambda kind: kube.get(kind, namespace, spec.base), SINGLES)
    lists = [released(kube, items) for items in found_by_kind]
    service = Service(spec.name, spec.uid, spec.base)
    revisions = service.revisions(lists[0])
    others = (living(items) for items in lists[1:3])
    deployments, config_maps = (service.of_revisions(items, revisions) for items in others)
    once = tuple(released(kube, [item for item in singles if item is not None]))
    _check_there(kube, spec, revisions, deployments, config_maps, once)
    found = lineage.ours(lists[3], spec.uid, {d["metadata"]["uid"] for d in deployments})
    ours = living(found)
    replicas = [p for p in ours if not has_ended(p)]
    readings = read_reports(replicas, reports, spec.autoscaling is not None)
    now = times.now()
    views = [view(pod, reading, now) for pod, reading in zip(replicas, readings, strict=True)]
    leaves = leaving(found, deployments, now)
    pods = tuple(awaiting(pod, leaves) for pod in views)
    if spec.autoscaling is not None:
        pods = tuple(_with_load(reports, pod) for pod in pods)
    jobs = tuple(service.of_revisions(lists[4], revisions))
    preparing = _preparing(kube, spec, jobs, now) if jobs else ()
    return Observed(
        revisions=revisions,
        deployments=deployments,
        config_maps=config_maps,
        pods=pods,
        ended=ended(ours),
        jobs=jobs,
        preparing=preparing,
        claim_templates=_claim_templates(kube, spec, service, revisions),
        needless=needless_waits(pods, found, now),
        singles=once,
    )


def _check_there(kube: Kube, spec: ServiceSpec, *children: Sequence[Object]) -> None:
    """Raises Gone where children are missing or have no owner because the service is deleted, which
    was read before them. They are being collected, and would be made again; or they are to stay,
    and with an owner that is gone they would be collected."""
    complete = all(children) and len(children[-1]) == len(SINGLES)
    if complete and all(is_owned(child, spec.uid) for items in children for child in items):
        return
    now = (kube.get(KIND, spec.namespace, spec.name) or {}).get("metadata", {})
    if now.get("uid") != spec.uid or now.get("deletionTimestamp"):
        raise Gone(f"{spec.namespace}/{spec.name} is deleted")


def _claim_templates(
    kube: Kube, spec: ServiceSpec, service: Service, revisions: list[Object]
) -> tuple[Object, ...]:
    """Listed only for services with spec.resources.gpuDeviceClass, now or in an earlier revision:
    API servers before 1.34 lack the kind."""
    if not spec.device_class and not any("claimTemplate" in r["data"] for r in revisions):
        return ()
    try:
        selector = f"{LABEL_SERVICE}={spec.base}"
        found = kube.select("ResourceClaimTemplate", spec.namespace, selector)
    except Missing:
        if spec.device_class:
            raise SpecError(UNSERVED) from None
        return ()
    return tuple(service.of_revisions(living(found), revisions))


def leaving(pods: list[Object], deployments: list[Object], now: str) -> str:
    """The name of a pod that leaves its node: terminating within its grace period, whose end
    deletionTimestamp is (a later one may be stuck), or one of a Deployment that wants fewer."""
    surplus: Counter[str] = Counter()  # by revision: placed pods above the wanted ones
    for item in deployments:
        surplus[revision_of(item)] -= item["spec"].get("replicas", 1)
    placed = [p for p in pods if (p.get("spec") or {}).get("nodeName") and not has_ended(p)]
    for pod in placed:
        ends = pod["metadata"].get("deletionTimestamp")
        surplus[revision_of(pod)] += not ends
        if ends and ends > now:
            return str(pod["metadata"]["name"])
    found = (p for p in placed if not p["metadata"].get("deletionTimestamp"))
    return next((str(p["metadata"]["name"]) for p in found if surplus[revision_of(p)] > 0), "")


def needless_waits(pods: tuple[PodView, ...], found: list[Object], now: str) -> Waits:
    """Of terminating pods that wait for their clients (preStop) while another pod of the service
    lacks what they hold, such as the only GPU. As long as a replica is ready, or the lack is of
    something else, their wait does serve."""
    lacking = any(p.awaits and any(s in p.unschedulable for s in SHORTAGES) for p in pods)
    if not lacking or any(p.ready for p in pods):
        return ()
    terminating = (p for p in found if (p["metadata"].get("deletionTimestamp") or "") > now)
    running = [p for p in terminating if not has_ended(p)]
    waits = [(revision_of(p), (p.get("status") or {}).get("podIP")) for p in running]
    return tuple(sorted((revision, address) for revision, address in waits if address))


def awaiting(pod: PodView, leaves: str) -> PodView:
    """A pod without a node is no failure while another of the service leaves one: in Recreate and
    Replace it gets what that one had, where it lacks no more than that."""
    kept_away = any(words in pod.unschedulable for words in KEPT_AWAY)
    return replace(pod, awaits=leaves) if kept_away else pod


def _preparing(
    kube: Kube, spec: ServiceSpec, jobs: tuple[Object, ...], now: str
) -> tuple[PodView, ...]:
    found = kube.select("Pod", spec.namespace, f"{LABEL_PREPARES}={spec.base}")
    uids = [job["metadata"]["uid"] for job in jobs]
    ours = [p for p in found if any(is_owned(p, uid) for uid in uids)]
    views = [view(_with_download(pod), Reading(None), now) for pod in ours]
    return tuple(sorted(views, key=lambda p: (p.created, p.name)))


def _with_download(pod: Object) -> Object:
    """A Job's pod downloads in its only container, a service's pod in an init container."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    return {
        **pod,
        "spec": {"initContainers": spec.get("containers"), **spec},
        "status": {"initContainerStatuses": status.get("containerStatuses"), **status},
    }


def read_reports(pods: list[Object], reports: Reports, loads: bool) -> list[Reading]:
    """Of all pods at once, with their `loads`, which are read after them."""
    ports = [_port(pod) for pod in pods]
    for port in filter(None, ports):
        reports.begin(*port, load=loads and port[-1])
    return [reports.read(*port) if port is not None else Reading(None) for port in ports]


def _port(pod: Object) -> tuple[str, str, bool] | None:
    """UID, address and whether it is ready; None where its server does not run."""
    status = pod.get("status") or {}
    address = status.get("podIP")
    server = container(status.get("containerStatuses"), SERVER_CONTAINER)
    if not address or "running" not in (server.get("state") or {}):
        return None
    return pod["metadata"]["uid"], address, is_ready(status)


def _with_load(reports: Reports, pod: PodView) -> PodView:
    if not (pod.ready and pod.address):
        return pod
    return replace(pod, load=reports.load(pod.uid, pod.address))
