"""Read: a candidate's pods as the gate sees them: sizes, failures that reject, and what hinders."""

from __future__ import annotations

from kvline_contract.exits import meaning
from kvline_operator.gate import Candidate, Kind
from kvline_operator.observe import PodView

OOM_RESTARTS = 4  # kills while sizing that still count as shrink-and-retry
IMAGE_REASONS = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}


def view(kind: Kind, pods: tuple[PodView, ...], promoted: bool) -> Candidate:
    replicas = tuple(p.measured for p in pods if p.measured is not None)
    return Candidate(
        kind=kind,
        replicas=replicas,
        failure=next(filter(None, map(failure, pods)), ""),
        hindrance=next(filter(None, map(hindrance, pods)), ""),
        stage=next((f"{p.name}: {p.report.state}" for p in pods if p.report is not None), ""),
        promoted=promoted,
    )


def failure(pod: PodView) -> str:
    """Why a pod's engine rejects its revision: a container that ended twice with such a code."""
    ended = pod.failed
    if ended is None or not meaning(ended.code).rejects:
        return ""
    ends = pod.restarts + (0 if pod.running else 1)
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
    for ended in (pod.failed, pod.download_ended):
        if ended is not None and ended.code and not meaning(ended.code).rejects:
            return f"{pod.name}: {meaning(ended.code).name}: {ended.message}"
    if pod.report_invalid:
        return f"{pod.name}: its sizing report cannot be read: {pod.report_error}"
    return ""
