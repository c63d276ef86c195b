"""The candidate's pods as input of the gate: sizes, failures and blockers. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.exits import meaning
from kvline_contract.progress import headline
from kvline_operator.observe.pods import PodView
from kvline_operator.plan.gate import Candidate, ComparisonGroup
from kvline_operator.store.container_ends import Ends, without_empty
from kvline_operator.store.revision_state import RevisionState

# OOM kills while sizing after which the next start may succeed: on a CPU it tries a smaller size;
# on a GPU the KV cache takes no host memory, but a single kill may have been the node's.
OOM_RETRIES, OOM_RETRIES_GPU = 4, 1
IMAGE_REASONS = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"}


def view(group: ComparisonGroup, pods: tuple[PodView, ...], promoted: bool) -> Candidate:
    failures = [(p, text) for p in pods if (text := failure(p, group.gpus))]
    first = failures[0][0].failed if failures else None
    replicas = tuple(p.measured for p in pods if p.measured is not None)
    return Candidate(
        group=group,
        replicas=replicas,
        failure=failures[0][1] if failures else "",
        diagnosis=first.termination if first is not None else None,
        blocker=next(filter(None, map(blocker, pods)), ""),
        stage=next(filter(None, map(_stage, pods)), ""),
        promoted=promoted,
    )


def _stage(pod: PodView) -> str:
    if pod.report is not None:
        current = pod.report.current  # None: of an earlier server, or one that does not start
        return f"{pod.name}: {headline(current) if current else pod.report.state}"
    return waiting(pod)


def waiting(pod: PodView) -> str:
    """That it waits for a pod that leaves its node; empty where it does not."""
    if not pod.awaits:
        return ""
    why = pod.unschedulable
    return f"{pod.name} has no node until {pod.awaits} has left one: {why}"


def counted(
    states: dict[str, RevisionState], pods: tuple[PodView, ...]
) -> tuple[dict[str, RevisionState], tuple[PodView, ...]]:
    """`states` with the last container terminations of these pods, and the pods with their counts.
    The counts of a pod that is gone are dropped."""
    after = {}
    for name, state in states.items():
        mine = (p for p in pods if p.revision == name)
        found = {p.uid: _with_last(state.ends.get(p.uid, Ends()), p) for p in mine}
        after[name] = replace(state, ends=without_empty(found))
    stored = {uid: ends for s in after.values() for uid, ends in s.ends.items()}

    def with_counts(pod: PodView) -> PodView:
        ends = stored.get(pod.uid, Ends())
        return replace(pod, failures=len(ends.failed), oom_kills=len(ends.oom_killed))

    return after, tuple(map(with_counts, pods))


def _with_last(ends: Ends, pod: PodView) -> Ends:
    """Exit codes that hold, external kills and exit code 0 are not the engine's failures."""
    last = pod.failed
    if last is None or last.from_outside:
        return ends
    if last.oom_killed:
        return ends.with_oom_kill(pod.end_number)
    return ends.with_failure(pod.end_number) if meaning(last.code).rejects else ends


def failure(pod: PodView, gpus: int) -> str:
    """Why a pod rejects its revision: its engine failed twice, or was OOMKilled more often than
    sizing retries. Empty where it does not."""
    ended = pod.failed
    if ended is None or ended.from_outside or not meaning(ended.code).rejects:
        return ""
    retries = OOM_RETRIES_GPU if gpus else OOM_RETRIES
    count, least = (pod.oom_kills, retries + 1) if ended.oom_killed else (pod.failures, 2)
    if count < least:
        return ""
    if gpus and ended.oom_killed:
        return f"{pod.name}: {host_memory(count)}"
    what = "OOMKilled" if ended.oom_killed else meaning(ended.code).title
    return f"{pod.name} ended {count} times, with code {ended.code} ({what}): {ended.message}"


def host_memory(kills: int) -> str:
    """Of a container with a GPU that was OOMKilled."""
    return (
        f"the container was killed at its limit of host memory, kill {kills}; the KV cache is on "
        "the GPU and takes none of it: raise spec.resources.memory"
    )


def blocker(pod: PodView) -> str:
    """What prevents the measurement of a pod whose engine did not fail; empty for nothing."""
    if pod.unschedulable and not pod.awaits:
        return f"{pod.name} has no node: {pod.unschedulable}"
    if pod.waiting_reason in IMAGE_REASONS or pod.waiting_reason == "CreateContainerConfigError":
        return f"{pod.name}: {pod.waiting_reason}: {pod.waiting_message}"
    if pod.killed is not None:
        return f"{pod.name}: {pod.killed.killed_text}"
    for ended in (pod.failed, pod.download_ended):
        if ended is not None and ended.code and not meaning(ended.code).rejects:
            return f"{pod.name}: {meaning(ended.code).title}: {ended.message}"
    if pod.report_invalid:
        return f"{pod.name}: its sizing report cannot be read: {pod.report_error}"
    return ""
