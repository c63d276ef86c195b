"""The state of the prepare Job that a revision's pods wait for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvline_contract.exits import ExitCode
from kvline_contract.names import revision_of
from kvline_operator.api.spec import ServiceSpec, Strategy
from kvline_operator.observe import trouble
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import PodView, condition_of
from kvline_operator.observe.trouble import Effect, Trouble
from kvline_operator.plan import jobs

Object = dict[str, Any]
MAX_NODES = 8
POD_TIMEOUT = 60.0  # seconds without a pod: a quota or an admission plug-in refuses it
NO_COMMAND = "invalid choice"  # in the message of an image that was made before the check
ONE_POD = "ReadWriteOncePod"  # in the scheduler's message about a claim that another pod uses


@dataclass(frozen=True, slots=True)
class Preparation:
    job: Object  # as rendered
    exists: bool = False
    done: bool = False
    trouble: Trouble | None = None  # why its pods still wait, where a condition reports that
    message: str = ""  # what it does, or its trouble
    has_read: bool = False  # the model

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def blocked(self) -> bool:
        """By something that may need a user."""
        return self.trouble is not None and self.trouble.effect is Effect.HOLDS


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
    lost = any(p.ended and p.failed and p.failed.code == ExitCode.MODEL_NOT_FOUND for p in pods)
    fresh = wanted != stable and not any(
        s.replicas for s in observed.deployment_states if s.revision == wanted
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
    has_read = _has(live, "Complete") or any(map(_succeeded, mine))
    running = {s.revision for s in observed.deployment_states if s.replicas} - {wanted}
    shared = any(_claims(revision) & _claims(stored.get(other, {})) for other in running)
    done = has_read or (not loads and _cannot_check(mine, shared))
    found = None if done else _trouble(live, mine, loads, now)
    what = f"Job {name}: {found.message}" if found is not None else f"Job {name} {what}"
    if found is not None:
        found = replace(found, message=what)
    elif loads and not done:
        found = Trouble("ModelAvailable", "Downloading", what, what, Effect.WAITS)
    return Preparation(made, True, done, found, what, has_read)


def _claims(revision: Object) -> set[str]:
    pod = revision.get("data", {}).get("podTemplate", {}).get("spec", {})
    found = (v.get("persistentVolumeClaim", {}) for v in pod.get("volumes", []))
    return {claim["claimName"] for claim in found if claim}


def _cannot_check(pods: list[PodView], shared: bool) -> bool:
    """Whether the image has no such command, which shows that it was pulled, or the claim, `shared`
    with serving replicas, cannot be mounted beside them, so that the Job would wait for ever."""
    if ends := [end for pod in pods for end in trouble.ends(pod)]:
        return any(e.code == ExitCode.USAGE and NO_COMMAND in e.message for e in ends)
    return shared and any(ONE_POD in pod.unschedulable or pod.not_set_up for pod in pods)


def _trouble(live: Object, pods: list[PodView], loads: bool, now: datetime) -> Trouble | None:
    failed = ("ModelAvailable", "DownloadFailed") if loads else ("ModelAvailable", "CheckFailed")
    found = trouble.of_job(tuple(pods), failed)
    if found is not None:
        return found
    if _has(live, "Failed"):
        why = condition_of(live.get("status") or {}, "Failed").get("message", "")
        text = f"failed, and is created again: {why}"
        return Trouble(*failed, text, text)
    if not pods and _seconds(live["metadata"].get("creationTimestamp", ""), now) > POD_TIMEOUT:
        text = "it has no pod; see `kubectl describe` of the Job"
        return Trouble("Progressing", "PodsRefused", text, text)
    return None


def _seconds(since: str, now: datetime) -> float:
    """Seconds since an RFC 3339 time; 0 where there is none."""
    return (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0


def _succeeded(pod: PodView) -> bool:
    return any(end.code == 0 for end in trouble.ends(pod))


def unfinished(observed: Observed) -> list[Object]:
    """Jobs without result; one whose pod has succeeded counts as finished."""
    succeeded = {p.revision for p in observed.preparing if _succeeded(p)}
    return [
        job
        for job in observed.jobs
        if not job["metadata"].get("deletionTimestamp")
        and not (_has(job, "Complete") or _has(job, "Failed"))
        and revision_of(job) not in succeeded
    ]


def _has(live: Object, kind: str) -> bool:
    return condition_of(live.get("status") or {}, kind).get("status") == "True"
