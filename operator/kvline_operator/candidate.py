"""Read: a candidate's pods as the gate sees them: sizes, failures that reject, and what hinders."""

from __future__ import annotations

from kvline_contract.exits import meaning
from kvline_operator.gate import Candidate, Kind
from kvline_operator.kills import Kills, merge
from kvline_operator.observe import PodView

OOM_RESTARTS = 4  # kills while sizing that still count as shrink-and-retry
IMAGE_REASONS = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}


def view(
    kind: Kind, pods: tuple[PodView, ...], promoted: bool, kept: Kills | None = None
) -> Candidate:
    """`kept` are the ends that are known to have come from outside."""
    killed = kills(kept or {}, pods)
    failures = [(p, text) for p in pods if (text := failure(p, killed))]
    first = failures[0][0].failed if failures else None
    replicas = tuple(p.measured for p in pods if p.measured is not None)
    return Candidate(
        kind=kind,
        replicas=replicas,
        failure=failures[0][1] if failures else "",
        diagnosis=first.termination if first is not None else None,
        hindrance=next(filter(None, map(hindrance, pods)), ""),
        stage=next((f"{p.name}: {p.report.state}" for p in pods if p.report is not None), ""),
        promoted=promoted,
    )


def kills(kept: Kills, pods: tuple[PodView, ...]) -> Kills:
    """With the last ends of these pods, where they came from outside."""
    killed = [(p.uid, p.ends) for p in pods if p.failed is not None and p.failed.from_outside]
    return merge(kept, (p.uid for p in pods), killed)


def failure(pod: PodView, killed: Kills | None = None) -> str:
    """Why a pod's engine rejects its revision: a container that ended twice with such a code, kills
    from outside not counted."""
    ended = pod.failed
    if ended is None or ended.from_outside or not meaning(ended.code).rejects:
        return ""
    ends = pod.ends - len((killed or {}).get(pod.uid, ()))
    if ends < 2 or (ended.oom_killed and pod.restarts <= OOM_RESTARTS):
        return ""
    what = "OOMKilled" if ended.oom_killed else meaning(ended.code).name
    return f"{pod.name} ended {ends} times, with code {ended.code} ({what}): {ended.message}"


def hindrance(pod: PodView) -> str:
    """What keeps a pod from being measured, though its engine did not fail."""
    if pod.unschedulable:
        return f"{pod.name} has no node: {pod.unschedulable}"
    if pod.waiting_reason in IMAGE_REASONS or pod.waiting_reason == "CreateContainerConfigError":
        return f"{pod.name}: {pod.waiting_reason}: {pod.waiting_message}"
    if pod.killed is not None:
        return f"{pod.name}: {pod.killed.killed_text}"
    for ended in (pod.failed, pod.download_ended):
        if ended is not None and ended.code and not meaning(ended.code).rejects:
            return f"{pod.name}: {meaning(ended.code).name}: {ended.message}"
    if pod.report_invalid:
        return f"{pod.name}: its sizing report cannot be read: {pod.report_error}"
    return ""
