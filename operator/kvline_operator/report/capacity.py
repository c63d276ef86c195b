"""CapacityMeasured, CapacitySufficient and CapacityStable. Pure."""

from __future__ import annotations

from kvline_contract.memory import HEADROOM, rank_name
from kvline_contract.names import records_name
from kvline_contract.progress import headline
from kvline_contract.report import SizingReport, State
from kvline_operator.observe import trouble
from kvline_operator.observe.pods import Measured, PodView
from kvline_operator.observe.trouble import Trouble
from kvline_operator.plan.threshold import SEQUENCES, Judged, Thresholds, device
from kvline_operator.report.service_state import Condition, ServiceState
from kvline_operator.store.records import DRIFT_PERCENT, drifted
from kvline_operator.store.verdict import Phase

STATE_TEXTS = {  # for a server that does not report what it does
    State.AUTOTUNING: "tries kernels",
    State.PROBING: "measures memory beside a small KV cache",
    State.STRESSING: "plays the largest steps beside a small KV cache",
    State.SHRUNK_RETRY: "makes the KV cache smaller",
    State.VALIDATING: "plays the largest steps beside the whole KV cache",
    State.FAILED: "has failed",
}
UNREAD = ("ReportInvalid", "ReportMissing")
PROGRESS = [  # in this order; the condition shows the replica that is furthest
    State.FAILED,
    State.LOADING,
    State.AUTOTUNING,
    State.PROBING,
    State.STRESSING,
    State.SHRUNK_RETRY,
    State.VALIDATING,
    State.VALIDATED,
]


def measured(state: ServiceState) -> Condition:
    kind = "CapacityMeasured"
    if state.spec.replicas == 0:
        return Condition(kind, "Unknown", "ScaledToZero", "spec.replicas is 0")
    pods = state.stable or state.newest
    measured = [p for p in pods if p.kv_tokens is not None]
    if measured:
        fewest = min(measured, key=lambda p: p.kv_tokens or 0)
        text = f"{fewest.kv_tokens} KV tokens are validated on {measured[0].node}"
        return Condition(kind, "True", "Validated", text + _least_left(fewest))
    found = [t for t in trouble.of_all(pods) if t.condition == kind]
    failed = next((t for t in found if t.reason not in UNREAD), None)
    if failed is not None:
        return Condition(kind, "False", failed.reason, failed.message)
    unread = next(filter(None, map(trouble.of_report, pods)), None)
    return _measuring(kind, pods, unread)


def _least_left(pod: PodView) -> str:
    """Of several ranks the one that limits the budget: its GPU is where to search for the cause."""
    result = pod.result
    if result is None or len(result.ranks) == 1:
        return ""
    name = rank_name(result.binding_rank, len(result.ranks), result.memory.gpu is not None)
    return f"; {name} has the least memory left, {result.memory.mib(HEADROOM)} MiB"


def _measuring(kind: str, pods: tuple[PodView, ...], unread: Trouble | None) -> Condition:
    """No result and no failure yet: the stage of the replica that is furthest."""
    reports = [p.report for p in pods if p.report is not None]
    if reports:
        report = max(reports, key=lambda r: PROGRESS.index(r.state))
        return Condition(kind, "False", str(report.state), stage(report))
    if unread is not None:
        return Condition(kind, "Unknown", unread.reason, unread.message)
    return Condition(kind, "Unknown", "Pending", _no_report(pods))


def _no_report(pods: tuple[PodView, ...]) -> str:
    if any(p.running for p in pods):
        return "the container has just started"
    ended = next((p.failed for p in pods if p.failed is not None), None)
    if ended is None:
        return "no container runs yet"
    return f"no container runs: the last one ended with {ended.title}"


def stage(report: SizingReport) -> str:
    """What a start does."""
    return headline(report.current) if report.current is not None else _earlier(report)


def _earlier(report: SizingReport) -> str:
    """Of a server that does not report what it does."""
    if report.state is State.LOADING:
        return _loading(report)
    tried = [a.target_tokens for a in report.attempts if a.number]
    return f"attempt {len(tried)} at {tried[-1]} tokens" if tried else STATE_TEXTS[report.state]


def _loading(report: SizingReport) -> str:
    """Progress of loading, which tells a slow volume from a hung one. In steps of 2 %, which limits
    the status writes of one load to 50."""
    for stage in report.stages:
        if stage.total_bytes:
            done = stage.bytes - stage.bytes % max(1, stage.total_bytes // 50)
            return f"loading {done >> 20:,} of {stage.total_bytes >> 20:,} MiB"
    return "loading"


def sufficient(state: ServiceState) -> Condition:
    """Whether each replica of the spec's revision reaches its threshold. Reports the one with the
    smallest margin, its binding threshold and where that comes from."""
    kind = "CapacitySufficient"
    sized = [(p, m) for p in state.newest if (m := p.measured) is not None]
    if not sized:
        return Condition(kind, "Unknown", "Unknown", "no replica of this spec is measured yet")
    gate = state.plan.gate if state.plan.candidate else None
    pod, size = state.limits.lowest(sized)
    short = state.limits.short(size)
    if short is not None and short.limit.by_minimum:
        return Condition(kind, "False", "BelowMinimum", _too_little(pod, size, short))
    if short is not None:
        return Condition(kind, "False", "BelowBaseline", _too_little(pod, size, short))
    if gate is not None and gate.phase is Phase.HELD:
        return Condition(kind, "False", "NotComparable", gate.message)
    for other, new in sized:
        if state.limits.unknown(new.gpu) and not state.limits.minimum and not other.ready:
            text = (
                f"{other.name} measured {new.tokens} KV tokens on {device(new.gpu)}, which has no "
                "baseline: set spec.capacity.minKVTokens, or promote"
            )
            return Condition(kind, "False", "NotComparable", text)
    text = "measured " + "; ".join(each.text() for each in state.limits.judged(size))
    if size.slots is None and state.spec.min_sequences:
        text += "; no layer keeps a recurrent state, so spec.capacity.minSequences asks nothing"
    return Condition(kind, "True", "Sufficient", text)


def _too_little(pod: PodView, size: Measured, short: Judged) -> str:
    traffic = "it stays ready" if pod.ready else "it takes no traffic"
    by_minimum = short.limit.by_minimum
    ask = "lower that" if by_minimum else "lower spec.rollout.minCapacityPercent, promote"
    text = f"{pod.name} measured {short.text()}, {traffic}; {ask}"
    if short.unit == SEQUENCES:
        return f"{text}, or raise spec.engine.maxRunningRequests"
    host = "" if pod.on_gpu else "raise spec.resources.memory, "  # which holds no GPU's KV cache
    slots = pod.result is not None and pod.result.state_slots is not None
    fewer = ["maxPrefillTokens", "maxRunningRequests", *(["prefixSnapshots"] if slots else [])]
    fewer += ["maxImagePatches"] if size.encoder else []
    *others, last = fewer
    return f"{text}, {host}or lower spec.engine.{', '.join(others)} or {last}"


def _below_baseline(state: ServiceState) -> str:
    """The stable revision's replica furthest below minCapacityPercent of the baseline, if any. It
    serves nevertheless."""
    percent = state.spec.rollout.min_capacity_percent
    kept = state.stable_state
    sequences = {gpu: slots.sequences for gpu, slots in (kept.slots or {}).items()}
    expected = Thresholds(percent=percent, baseline=kept.baseline, sequences=sequences)
    sized = [(p, m) for p in state.stable if (m := p.measured) is not None]
    below = [(p, m) for p, m in sized if expected.short(m)]
    if not below:
        return ""
    pod, size = expected.lowest(below)
    short = expected.short(size)
    assert short is not None, "it is below"
    return (
        f"{pod.name} measured {short.text('expected')}; its revision was accepted, so it serves "
        f"nevertheless; {_what_changed(pod, size, state)}, or begin a new baseline by "
        f"spec.rollout.promote: {state.plan.stable}"
    )


def _what_changed(pod: PodView, size: Measured, state: ServiceState) -> str:
    """Its memory, where the size that is the baseline is recorded with another; else it is on its
    node."""
    best = state.stable_state.baseline.get(size.gpu)
    now = pod.result.memory.total_mib if pod.result is not None else 0
    then = {r.memory.total_mib for r in state.records.values() if r.kv_tokens == best}
    if not then or now in then:
        return "check what changed on its node"
    return f"it has {now} MiB of memory, the baseline {max(then)}: check what changed that"


def stable(state: ServiceState) -> Condition:
    """Whether replicas measure as much as their baseline and as identical replicas before."""
    kind = "CapacityStable"
    short = _below_baseline(state)
    if short:
        return Condition(kind, "False", "BelowBaseline", short)
    known = 0
    for pod in state.pods:
        result = pod.result
        record = state.records.get(result.fingerprint) if result is not None else None
        if result is None or record is None or not record.like(len(result.ranks)):
            continue
        known += 1
        if drifted(record, result):
            change = 100 * (result.kv_tokens - record.kv_tokens) / record.kv_tokens
            text = (
                f"{pod.name} measured {result.kv_tokens} KV tokens where an identical replica had "
                f"{record.kv_tokens} ({change:+.1f} %): others use more or less memory there now; "
                f"delete ConfigMap {records_name(state.spec.base)} to record sizes anew"
            )
            return Condition(kind, "False", "Drifted", text)
    if state.records and not any(p.result for p in state.pods):
        text = f"no replica is measured yet; sizes are recorded: {len(state.records)}"
        return Condition(kind, "Unknown", "Unknown", text)
    if not known:
        return Condition(kind, "Unknown", "NoRecord", "no size of these replicas is recorded")
    return Condition(kind, "True", "Stable", f"within {DRIFT_PERCENT} % of the recorded sizes")
