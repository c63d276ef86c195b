"""The state of the prepare Job that a revision's pods wait for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvline_contract.exits import ExitCode, meaning
from kvline_contract.names import LABEL_REVISION
from kvline_operator.api.spec import ServiceSpec, Strategy
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import Ended, PodView, condition_of
from kvline_operator.plan import jobs
from kvline_operator.plan.candidate import IMAGE_REASONS

Object = dict[str, Any]
MAX_NODES = 8
POD_TIMEOUT = 60.0  # seconds without a pod: a quota or an admission plug-in refuses it
MOUNT_TIMEOUT = 120.0  # seconds; a claim may be attached to the node of a serving pod alone
NO_COMMAND = "invalid choice"  # in the message of an image that was made before the check
ONE_POD = "ReadWriteOncePod"  # in the scheduler's message about a claim that another pod uses


@dataclass(frozen=True, slots=True)
class Preparation:
    job: Object  # as rendered
    exists: bool = False
    done: bool = False
    condition: str = ""  # the condition that reports it; empty: in progress
    reason: str = ""
    message: str = ""
    blocked: bool = False  # by something that may need a user

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


def of(
    spec: ServiceSpec,
    observed: Observed,
    wanted: str,
    stable: str,
    stored: dict[str, Object],
    now: datetime,
) -> Preparation | None:
    """The Job that the pods of `wanted` wait for; None where they wait for none: they exist
    already, or they download the model themselves and replace no serving pod."""
    revision = stored[wanted]
    loads = jobs.downloads(revision)
    pods = [p for p in observed.pods if p.revision == wanted]
    lost = any(p.failed and p.failed.code == ExitCode.MODEL_NOT_FOUND for p in pods)
    fresh = wanted != stable and not any(
        s.replicas for s in observed.deployment_states() if s.revision == wanted
    )
    if loads and (fresh or lost):
        made = jobs.job(spec, revision)
    elif fresh and stable and spec.rollout.strategy is not Strategy.SURGE:
        nodes = sorted({p.node for p in observed.pods if p.revision == stable and p.node})
        made = jobs.job(spec, revision, tuple(nodes[:MAX_NODES]))
    else:
        return None
    name = made["metadata"]["name"]
    live = next((j for j in observed.jobs if j["metadata"]["name"] == name), None)
    what = "downloads" if loads else "pulls the image and checks"
    what += f" {spec.source.text}"
    if live is None or live["metadata"].get("deletionTimestamp"):
        return Preparation(made, live is not None, message=f"Job {name} {what}")
    mine = [p for p in observed.preparing if p.revision == wanted]
    done = _has(live, "Complete") or any(e.code == 0 for e in _ends(mine))
    running = {s.revision for s in observed.deployment_states() if s.replicas} - {wanted}
    shared = any(_claims(revision) & _claims(stored.get(other, {})) for other in running)
    done = done or (not loads and _cannot_check(mine, shared, now))
    condition, reason, message = ("", "", "") if done else _state(live, mine, loads, now)
    if not message:
        condition, reason = ("ModelAvailable", "Downloading") if loads and not done else ("", "")
        return Preparation(made, True, done, condition, reason, f"Job {name} {what}")
    return Preparation(made, True, done, condition, reason, f"Job {name}: {message}", blocked=True)


def _claims(revision: Object) -> set[str]:
    pod = revision.get("data", {}).get("podTemplate", {}).get("spec", {})
    found = (v.get("persistentVolumeClaim", {}) for v in pod.get("volumes", []))
    return {claim["claimName"] for claim in found if claim}


def _cannot_check(pods: list[PodView], shared: bool, now: datetime) -> bool:
    """Whether the image has no such command, which shows that it was pulled, or the claim, `shared`
    with serving replicas, cannot be mounted beside them, so that the Job would wait for ever."""
    ends = list(_ends(pods))
    if ends:
        return any(e.code == ExitCode.USAGE and NO_COMMAND in e.message for e in ends)
    return shared and any(
        ONE_POD in pod.unschedulable or _seconds(pod.unmounted_since, now) > MOUNT_TIMEOUT
        for pod in pods
    )


def _state(live: Object, pods: list[PodView], loads: bool, now: datetime) -> tuple[str, str, str]:
    """Condition, reason and message of what blocks it; empty for nothing. The failure of its last
    pod is reported while the next one runs."""
    which = ("ModelAvailable", "DownloadFailed") if loads else ("ModelAvailable", "CheckFailed")
    failed = next((e for e in _ends(pods) if e.code), None)
    if failed is not None and meaning(failed.code).condition == "ModelAvailable":
        return "ModelAvailable", meaning(failed.code).reason, failed.message
    for pod in reversed(pods):
        if pod.waiting_reason == "CreateContainerConfigError":
            return "ModelAvailable", "SecretMissing", pod.waiting_message
        if pod.waiting_reason in IMAGE_REASONS:
            text = f"{pod.waiting_reason}: {pod.waiting_message}"
            return "Progressing", "ImagePullFailed", text
        if pod.unschedulable:
            return "Progressing", "Unschedulable", pod.unschedulable
        if _seconds(pod.unmounted_since, now) > MOUNT_TIMEOUT:
            text = f"its volumes or network are not set up on {pod.node}; see `kubectl describe`"
            return *which, f"{text} of pod {pod.name}"
    if failed is not None:
        return *which, f"ended with code {failed.code} ({failed.reason}): {failed.message}"
    if _has(live, "Failed"):
        text = condition_of(live.get("status") or {}, "Failed").get("message", "")
        return *which, f"failed, and is created again: {text}"
    if not pods and _seconds(live["metadata"].get("creationTimestamp", ""), now) > POD_TIMEOUT:
        return "Progressing", "PodsRefused", "it has no pod; see `kubectl describe` of the Job"
    return "", "", ""


def _seconds(since: str, now: datetime) -> float:
    """Seconds since an RFC 3339 time; 0 where there is none."""
    return (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0


def _ends(pods: list[PodView]) -> Iterator[Ended]:
    """Terminations, newest first."""
    for pod in reversed(pods):
        yield from (e for e in (pod.ended, pod.download_ended) if e is not None)


def unfinished(observed: Observed) -> list[Object]:
    """Jobs without result; one whose pod has succeeded counts as finished."""
    succeeded = {p.revision for p in observed.preparing if any(e.code == 0 for e in _ends([p]))}
    return [
        job
        for job in observed.jobs
        if not job["metadata"].get("deletionTimestamp")
        and not (_has(job, "Complete") or _has(job, "Failed"))
        and job["metadata"]["labels"].get(LABEL_REVISION) not in succeeded
    ]


def _has(live: Object, kind: str) -> bool:
    return condition_of(live.get("status") or {}, kind).get("status") == "True"
