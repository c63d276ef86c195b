"""The candidate's pods as input of the gate: sizes, failures and blockers. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.progress import headline
from kvline_operator.observe import trouble
from kvline_operator.observe.pods import PodView
from kvline_operator.observe.trouble import Effect, Trouble
from kvline_operator.plan.gate import Candidate, ComparisonGroup
from kvline_operator.store.container_ends import Ends, without_empty
from kvline_operator.store.revision_state import RevisionState

NONE = Ends()


def view(
    group: ComparisonGroup,
    pods: tuple[PodView, ...],
    promoted: bool,
    refusal: Trouble | None = None,
) -> Candidate:
    """`refusal`: why the revision lacks pods, if it does."""
    found = [(p, t) for p in pods if (t := trouble.of(p))]
    failed = [(p, t) for p, t in found if t.effect is Effect.REJECTS]
    holding = [t.text for _, t in found if t.effect is Effect.HOLDS]
    if refusal is not None and not any(p.running for p in pods):
        holding.append(refusal.text)
    first = failed[0][0].failed if failed else None
    return Candidate(
        group=group,
        replicas=tuple(p.measured for p in pods if p.measured is not None),
        failure=failed[0][1].text if failed else "",
        diagnosis=first.termination if first is not None else None,
        blocker=holding[0] if holding else "",
        stage=next(filter(None, map(_stage, pods)), ""),
        promoted=promoted,
    )


def _stage(pod: PodView) -> str:
    if pod.report is not None:
        current = pod.report.current  # None: of an earlier server, or one that does not start
        return f"{pod.name}: {headline(current) if current else pod.report.state}"
    found = trouble.of(pod)
    return found.text if found is not None else ""


def counted(
    states: dict[str, RevisionState], pods: tuple[PodView, ...]
) -> tuple[dict[str, RevisionState], tuple[PodView, ...]]:
    """`states` with the last container terminations of these pods, and the pods with their counts.
    The counts of a pod that is gone are dropped."""
    after = {}
    for name, state in states.items():
        mine = (p for p in pods if p.revision == name)
        found = {p.uid: _with_last(state.ends.get(p.uid, NONE), p) for p in mine}
        after[name] = replace(state, ends=without_empty(found))
    stored = {uid: ends for s in after.values() for uid, ends in s.ends.items()}

    def with_counts(pod: PodView) -> PodView:
        if pod.uid not in stored:
            return pod
        ends = stored[pod.uid]
        return replace(pod, failures=len(ends.failed), oom_kills=len(ends.oom_killed))

    return after, tuple(map(with_counts, pods))


def _with_last(ends: Ends, pod: PodView) -> Ends:
    """Ends that are not the engine's do not count."""
    last = pod.failed if pod.ended is not None else None
    if last is None or not last.of_engine:
        return ends
    if last.oom_killed:
        return ends.with_oom_kill(pod.end_number)
    return ends.with_failure(pod.end_number)
