"""In which phase a revision is, from what is stored of it. Pure.

A verdict or an expiry counts only beside the stable revision that it was made against
(decisions/013): another stable revision is another comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvline_operator.api.spec import ServiceSpec
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.store.revision_state import RevisionState, stable
from kvline_operator.store.verdict import GateResult, Phase, Sequences, Verdict


@dataclass(frozen=True, slots=True)
class Policy:
    """What of a spec decides which verdicts count."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    digest: str = ""  # ServiceSpec.policy

    @classmethod
    def of(cls, spec: ServiceSpec) -> Policy:
        limits = Thresholds(
            minimum=spec.min_kv_tokens,
            percent=spec.rollout.min_capacity_percent,
            min_sequences=spec.min_sequences,
        )
        return cls(limits, spec.policy)


def phase(
    state: RevisionState, accepted: RevisionState, policy: Policy, now: Verdict | None = None
) -> Phase:
    """`accepted`: the stable revision; `now`: today's verdict, of the revision that the spec asks
    for beside it."""
    if 0 < state.accepted == accepted.accepted:
        return Phase.ACCEPTED
    if now is None and has_expired(state, accepted, policy):
        return Phase.EXPIRED
    counts = now or current_verdict(state, accepted, policy.thresholds)
    return counts.phase if counts is not None else Phase.NEW


def phases(
    states: dict[str, RevisionState], policy: Policy, now: dict[str, Verdict | None]
) -> dict[str, Phase]:
    """Of all revisions of a service, by name."""
    accepted = states.get(stable(states)) or RevisionState()
    return {name: phase(state, accepted, policy, now.get(name)) for name, state in states.items()}


def tried(states: dict[str, RevisionState]) -> set[str]:
    """Revisions that have a verdict or an expiry beside the stable one, or run for one."""
    accepted = states.get(stable(states))
    if accepted is None:
        return set()
    return {
        name
        for name, state in states.items()
        if state.against(accepted)
        or state.missing_since
        or (state.expiry is not None and state.expiry.against == accepted.accepted)
    }


def current_verdict(
    state: RevisionState, accepted: RevisionState, policy: Thresholds
) -> Verdict | None:
    """The stored verdict that counts. A rejection for too few tokens or sequences does not once
    the current thresholds accept them."""
    stored = state.against(accepted)
    if stored is None:
        return None
    verdict = stored.verdict()
    counts = verdict.sequences or Sequences(0)
    if verdict.result is GateResult.PASSED or not (verdict.required or counts.required):
        return verdict
    limits = replace(policy, baseline={"": verdict.baseline}, sequences={"": counts.baseline})
    if verdict.measured < limits.of("").least:
        return verdict
    few = verdict.sequences is not None and counts.measured < limits.of_sequences("").least
    return verdict if few else None


def has_expired(state: RevisionState, accepted: RevisionState, policy: Policy) -> bool:
    """Until spec.rollout or spec.capacity changes. Earlier operators stored no policy."""
    expiry = state.expiry
    if expiry is None or expiry.against != accepted.accepted:
        return False
    return expiry.policy in ("", policy.digest)
