"""Read: the candidate's pods as input of the gate: sizes, failures and blockers. Pure."""

from __future__ import annotations

from kvline_contract.exits import meaning
from kvline_operator.gate import Candidate, ComparisonGroup
from kvline_operator.kills import Kills, merge
from kvline_operator.observe import PodView

OOM_RESTARTS = 4  # restarts after OOMKilled while sizing that still count as a smaller retry
IMAGE_REASONS = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}


def view(
    group: ComparisonGroup, pods: tuple[PodView, ...], promoted: bool, kept: Kills | None = None
) -> Candidate:
    """`kept` are container terminations already known to be external kills."""
    killed = kills(kept or {}, pods)
    failures = [(p, text) for p in pods if (text := failure(p, killed))]
    first = failures[0][0].failed if failures else None
    replicas = tuple(p.measured for p in pods if p.measured is not None)
    return Candidate(
        group=group,
        replicas=replicas,
        failure=failures[0][1] if failures else "",
        diagnosis=first.termination if first is not None else None,
        blocker=next(filter(None, map(blocker, pods)), ""),
        stage=next((f"{p.name}: {p.report.state}" for p in pods if p.report is not None), ""),
        promoted=promoted,
    )


def kills(kept: Kills, pods: tuple[PodView, ...]) -> Kills:
    """`kept` plus the last container terminations of these pods that were external kills."""
    killed = [(p.uid, p.ends) for p in pods if p.failed is not None and p.failed.from_outside]
    return merge(kept, (p.uid for p in pods), killed)


def failure(pod: PodView, killed: Kills | None = None) -> str:
    """Why a pod rejects its revision: its container terminated twice with an exit code that
    rejects, external kills not counted. Empty where it does not."""
    ended = pod.failed
    if ended is None or ended.from_outside or not meaning(ended.code).rejects:
        return ""
    ends = pod.ends - len((killed or {}).get(pod.uid, ()))
    if ends < 2 or (ended.oom_killed and pod.restarts <= OOM_RESTARTS):
        return ""
    what = "OOMKilled" if ended.oom_killed else meaning(ended.code).name
    return f"{pod.name} ended {ends} times, with code {ended.code} ({what}): {ended.message}"


def blocker(pod: PodView) -> str:
    """What prevents the measurement of a pod whose engine did not fail; empty for nothing."""
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
