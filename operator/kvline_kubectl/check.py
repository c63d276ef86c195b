"""`kubectl kvline check`: whether a changed spec would pass its gate, before it is applied. From
stored revisions, baselines and arithmetic, by the operator's own parser and gate. Pure.

A figure of an equal revision, or a bound, decides only beyond the noise of a measurement.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kvline_contract.codec import MAX_INTEGER
from kvline_contract.launch import Images
from kvline_operator.api.modalities import FIELD
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.errors import SpecError
from kvline_operator.observe.pods import Measured
from kvline_operator.observe.slots import Slots
from kvline_operator.plan import gate
from kvline_operator.plan.acceptance import baseline_of, comparison_group
from kvline_operator.plan.forecast import Bounds, as_many_run, bounds
from kvline_operator.plan.phase import Policy, current_verdict, has_expired, tried
from kvline_operator.plan.revisions import Revision, same_but_images, wanted
from kvline_operator.plan.threshold import device
from kvline_operator.plan.trade import Asked
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.records import DRIFT_PERCENT
from kvline_operator.store.revision_state import RevisionState, stable
from kvline_operator.store.verdict import GateResult, Verdict

Object = dict[str, Any]
DEFAULT_IMAGE = "the operator's default image"  # its name is the operator's alone
# What is asked by commands of the plugin, as another field manager than the manifest's.
VERBS = ("restartedAt", "upgradePolicy")
ROLLOUT_VERBS = ("paused", "promote")


class Result(StrEnum):
    PASSES = "Passes"
    REJECTED = "Rejected"
    HELD = "Held"  # it would be measured, and wait for a person
    UNKNOWN = "MustBeMeasured"


EXIT_CODES = {Result.PASSES: 0, Result.REJECTED: 3, Result.HELD: 3, Result.UNKNOWN: 4}


@dataclass(frozen=True, slots=True)
class Answer:
    result: Result
    message: str
    revision: str = ""
    low: int | None = None  # KV tokens of a replica
    high: int | None = None
    required: int | None = None
    sequences: int | None = None  # of a replica whose model keeps recurrent states
    required_sequences: int | None = None

    def plain(self) -> Object:
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Known:
    """KV tokens of a replica of the new revision, and where that is from."""

    gpu: str
    bytes_per_token: int
    tokens: Bounds
    source: str
    slots: Slots | None = None


def applied(new: Object, live: Object) -> Object:
    """The service after the manifest was applied: fields that the plugin wrote stay."""
    out = copy.deepcopy(new)
    out["metadata"] = {**live["metadata"], **out["metadata"], "uid": live["metadata"]["uid"]}
    spec, before = out["spec"], live["spec"]
    spec |= {key: before[key] for key in VERBS if key in before and key not in spec}
    asked = {k: v for k, v in (before.get("rollout") or {}).items() if k in ROLLOUT_VERBS}
    if asked:
        spec["rollout"] = {**asked, **(spec.get("rollout") or {})}
    return out


def check(body: Object, history: tuple[RevisionEntry, ...], image_outdated: bool) -> Answer:
    """Of a service as it would be; `image_outdated`: the operator's default image is another one
    than the stable revision's."""
    states = {past.name: past.state for past in history}
    accepted = next((past for past in history if past.name == stable(states)), None)
    if accepted is None:
        return Answer(Result.UNKNOWN, "no revision of it serves yet, so nothing is measured")
    existing = [past.revision for past in history]
    default = DEFAULT_IMAGE if image_outdated else accepted.image
    try:
        spec = parse(body)
        revision = wanted(spec, existing, default, accepted.name, tried(states))
    except SpecError as error:
        return Answer(Result.REJECTED, f"the spec is not accepted: {error}")
    if revision.name == accepted.name:
        return _same_pods(spec, accepted)
    state = states.get(revision.name, RevisionState())
    decided = _decided(spec, revision, state, accepted.state)
    answer = decided or _expected(spec, revision, state, accepted)
    if spec.rollout.paused:
        return replace(answer, message=f"{answer.message}; spec.rollout.paused holds it back")
    return answer


def _same_pods(spec: ServiceSpec, accepted: RevisionEntry) -> Answer:
    """Thresholds of an accepted revision take no replica away, but keep new ones out."""
    capacity = accepted.state.capacity
    tokens = capacity.kv_tokens if capacity is not None else None
    required = spec.min_kv_tokens or None
    sequences = capacity.sequences if capacity is not None else None
    result, text = Result.PASSES, "no new revision, and no pod is restarted"
    for field, least, found, unit in (
        ("minSequences", spec.min_sequences, sequences, "sequences"),
        ("minKVTokens", spec.min_kv_tokens, tokens, "KV tokens"),
    ):
        if found is not None and found < least:
            result = Result.REJECTED
            text = (
                f"no new revision; spec.capacity.{field} {least} is more than the {found} {unit} "
                "of a replica: those that serve stay, others become ready no more"
            )
    asked = spec.min_sequences or None
    return Answer(result, text, accepted.name, tokens, tokens, required, sequences, asked)


def _decided(
    spec: ServiceSpec, revision: Revision, state: RevisionState, accepted: RevisionState
) -> Answer | None:
    """What is decided already, beside the revision that serves."""
    policy = Policy.of(spec)
    verdict = current_verdict(state, accepted, policy.thresholds)
    if verdict is not None:
        tokens, required = verdict.measured or None, verdict.required or None
        text = f"revision {revision.name} is decided: {verdict.message}"
        answer = Answer(_of(verdict), text, revision.name, tokens, tokens, required)
        if (counts := verdict.sequences) is None:
            return answer
        few = counts.required or None
        return replace(answer, sequences=counts.measured, required_sequences=few)
    if has_expired(state, accepted, policy):
        why = state.expiry.message if state.expiry is not None else ""
        text = f"revision {revision.name} was not ready in time and is not tried again: {why}"
        return Answer(Result.REJECTED, text, revision.name)
    return None


def _of(verdict: Verdict) -> Result:
    if verdict.result is GateResult.HELD:
        return Result.HELD
    return Result.PASSES if verdict.result is GateResult.PASSED else Result.REJECTED


def _expected(
    spec: ServiceSpec, revision: Revision, state: RevisionState, accepted: RevisionEntry
) -> Answer:
    """The gate's verdict at both ends of what the new revision may measure."""
    candidate = gate.Candidate(comparison_group(spec.inputs), (), asked=Asked.of(spec.inputs))
    baseline = baseline_of(accepted.state, accepted.inputs)
    why = gate.incomparable(candidate, baseline)
    if why and not spec.min_kv_tokens:
        text = f"it would be held, as it cannot be compared ({why}): set spec.capacity.minKVTokens"
        return Answer(Result.HELD, text, revision.name)
    known, unsure = _before(revision, state, accepted), ""
    if known is None:
        if (never := _no_encoder(revision, accepted.revision)) is not None:
            return never
        known, unsure = _by_arithmetic(revision, accepted), _encoder(revision, accepted.revision)
    if known is None or (not known.tokens.low and known.tokens.high is None):
        text = "neither a stored figure nor arithmetic gives its KV tokens"
        return Answer(Result.UNKNOWN, text + unsure, revision.name)

    def at(tokens: int) -> Verdict:
        size = Measured(known.gpu, tokens, known.bytes_per_token, known.slots)
        seen = replace(candidate, replicas=(size,))
        return gate.evaluate(seen, baseline, Policy.of(spec).thresholds)

    near = _with_noise(known.tokens)
    low, high = near.low, near.high
    result = Result.UNKNOWN
    if low and at(low).result is not GateResult.REJECTED:
        result = _of(at(low))
    elif at(MAX_INTEGER if high is None else high).result is GateResult.REJECTED:
        result = Result.REJECTED  # for its sequences where no bound of its tokens is known
    limits = gate.thresholds(candidate, baseline, Policy.of(spec).thresholds)
    of_tokens, of_sequences = limits.of(known.gpu), limits.of_sequences(known.gpu)
    text = f"{_range(known.tokens)} KV tokens ({known.source}), {of_tokens.text(grouped=True)}"
    text += unsure
    low, high, least = known.tokens.low, known.tokens.high, of_tokens.least
    if known.slots is None and known.gpu in baseline.slots:
        text += "; how many sequences must be measured"
        result = Result.UNKNOWN if result is Result.PASSES else result
    if known.slots is None:
        return Answer(result, text, revision.name, low, high, least)
    sequences = known.slots.sequences
    text += f"; {sequences:,} sequences, {of_sequences.text(grouped=True)}"
    trade = gate.trades(candidate, baseline).get(known.gpu)
    text += f"; {trade.text}" if trade is not None and trade.text else ""
    few = of_sequences.least
    return Answer(result, text, revision.name, low, high, least, sequences, few)


def _asks_anew(revision: Revision, accepted: Revision) -> bool:
    return revision.images == Images.REQUIRED and not accepted.served


def _no_encoder(revision: Revision, accepted: Revision) -> Answer | None:
    """Where the same pods were to serve images if they can, and were measured without."""
    tried = accepted.images and same_but_images(revision, accepted)
    if not (_asks_anew(revision, accepted) and tried):
        return None
    text = (
        f"it would not start with image in {FIELD}: revision {accepted.name} was to serve images "
        "where it can, and serves text: its model has no encoder of images, or its server runs "
        "none on this device or in this context"
    )
    return Answer(Result.HELD, text, revision.name)


def _encoder(revision: Revision, accepted: Revision) -> str:
    if not _asks_anew(revision, accepted):
        return ""
    return "; whether its model has an encoder of images that its server runs, only a start tells"


def _before(revision: Revision, state: RevisionState, accepted: RevisionEntry) -> Known | None:
    """What a revision with these inputs and this image has measured before."""
    if (served := state.capacity) is not None:
        gpu = served.provenance.gpu if served.provenance is not None else ""
        tokens, each, slots = served.kv_tokens, served.compared_bytes, served.slots
    else:
        tokens = state.measured or state.seen_tokens
        each = accepted.state.bytes_per_token
        gpu = next(iter(accepted.state.baseline), "")
        if not tokens or len(accepted.state.baseline) > 1:  # on which GPU is not stored
            return None
        before = (accepted.state.slots or {}).get(gpu)
        slots = _slots(revision, accepted, before)
        counts = state.verdict.sequences if state.verdict is not None else None
        if before is not None and counts is not None:
            ran = replace(before, sequences=counts.measured)
            slots = Asked.of(revision.inputs).expected(ran)
    source = f"which an equal revision measured on {device(gpu)}"
    return Known(gpu, each, Bounds(tokens, tokens), source, slots)


def _by_arithmetic(revision: Revision, accepted: RevisionEntry) -> Known | None:
    measured = accepted.state.capacity
    if measured is None or revision.image != accepted.image:
        return None
    found = bounds(measured, accepted.revision.settled, revision.settled)
    gpu = measured.provenance.gpu if measured.provenance is not None else ""
    source = f"arithmetic from the {measured.kv_tokens:,} of revision {accepted.name}"
    slots = _slots(revision, accepted, measured.slots)
    return Known(gpu, measured.compared_bytes, found, source, slots)


def _slots(revision: Revision, accepted: RevisionEntry, before: Slots | None) -> Slots | None:
    """None also where the server will choose anew how many requests run."""
    if before is None or not as_many_run(accepted.revision.settled, revision.settled):
        return None
    return Asked.of(revision.inputs).expected(before)


def _with_noise(tokens: Bounds) -> Bounds:
    high = tokens.high
    more = None if high is None else -(-high * (100 + DRIFT_PERCENT) // 100)
    return Bounds(tokens.low * (100 - DRIFT_PERCENT) // 100, more)


def _range(tokens: Bounds) -> str:
    if tokens.low == tokens.high:
        return f"{tokens.low:,}"
    if tokens.high is None:
        return f"at least {tokens.low:,}"
    return f"{tokens.low:,} to {tokens.high:,}" if tokens.low else f"at most {tokens.high:,}"
