"""Two capacities: KV tokens, and sequences of a model whose layers keep recurrent states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from services import BODY, by_type, hybrid_pod, ready_pod, service_state

from kvline_contract.launch import GateFile
from kvline_kubectl import show
from kvline_operator.api.spec import parse
from kvline_operator.observe.pods import Measured
from kvline_operator.observe.slots import Slots
from kvline_operator.plan.acceptance import baseline_of, updated
from kvline_operator.plan.gate import Baseline, Candidate, ComparisonGroup, evaluate, thresholds
from kvline_operator.plan.phase import current_verdict
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.plan.trade import Asked, Trade
from kvline_operator.report import status
from kvline_operator.report.display import slots
from kvline_operator.report.effective import effective
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus, retained
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult, Sequences, StoredVerdict

PASSED, HELD, REJECTED = GateResult.PASSED, GateResult.HELD, GateResult.REJECTED
GROUP = ComparisonGroup("hf://org/hybrid", 1)
EACH, SLOT = 100, 2000  # bytes of a token, and of a slot: 20 tokens
BEFORE = Slots(256, 64, SLOT)
ASKED = Asked(256, 64)
BASELINE = Baseline(GROUP, EACH, {"H200": 20_000}, {"H200": BEFORE}, ASKED)


def candidate(
    tokens: int, sequences: int | None, snapshots: int = 64, asked: Asked = ASKED
) -> Candidate:
    slots = None if sequences is None else Slots(sequences, snapshots, SLOT)
    return Candidate(GROUP, (Measured("H200", tokens, EACH, slots),), asked=asked)


@pytest.mark.parametrize(
    ("what", "found", "policy", "result", "text"),
    [
        (
            "both are held",
            candidate(19_000, 256),
            Thresholds(0, 95),
            PASSED,
            "measured 19000 KV tokens, 19000 are required (95 % of the baseline 20000 on H200); "
            "256 sequences, 244 are required (95 % of the baseline 256 on H200)",
        ),
        (
            "sequences were lost that nobody gave up",
            candidate(25_000, 192),
            Thresholds(0, 95),
            REJECTED,
            "192 sequences, 244 are required (95 % of the baseline 256 on H200): 52 short",
        ),
        (
            "so were tokens, for sequences that nobody asked for",
            candidate(14_880, 512),
            Thresholds(0, 95),
            REJECTED,
            "measured 14880 KV tokens, 19000 are required",
        ),
        (
            "what the spec asks for is taken from the baseline, and named",
            candidate(14_200, 512, asked=Asked(512, 64)),
            Thresholds(0, 95),
            PASSED,
            "14136 are required (95 % of the baseline 14880 on H200); 512 sequences, none are "
            "required, as the spec changed maxRunningRequests; +256 requests cost 5120 KV tokens",
        ),
        (
            "more was lost than that",
            candidate(14_100, 512, asked=Asked(512, 64)),
            Thresholds(0, 95),
            REJECTED,
            "36 short; 512 sequences, none are required, as the spec changed maxRunningRequests; "
            "+256 requests cost 5120 KV tokens",
        ),
        (
            "a minimum decides over both",
            candidate(14_200, 512, asked=Asked(512, 64)),
            Thresholds(15_000, 95),
            REJECTED,
            "15000 are required (spec.capacity.minKVTokens): 800 short",
        ),
        (
            "fewer requests, as asked",
            candidate(25_000, 128, asked=Asked(128, 64)),
            Thresholds(0, 95),
            PASSED,
            "128 sequences, none are required, as the spec changed maxRunningRequests; "
            "-128 requests leave 2560 more KV tokens",
        ),
        (
            "a pinned size does not grow by them",
            candidate(20_000, 128, asked=Asked(128, 64, pinned=True)),
            Thresholds(0, 95),
            PASSED,
            "19000 are required",
        ),
        (
            "fewer requests hide no other loss",
            candidate(21_000, 128, asked=Asked(128, 64)),
            Thresholds(0, 95),
            REJECTED,
            "21432 are required (95 % of the baseline 22560 on H200): 432 short; 128 sequences",
        ),
        (
            "but the minimum of sequences holds",
            candidate(25_000, 128, asked=Asked(128, 64)),
            Thresholds(0, 95, min_sequences=200),
            REJECTED,
            "128 sequences, 200 are required (spec.capacity.minSequences): 72 short",
        ),
        (
            "snapshots for requests",
            candidate(20_000, 300, 20, Asked(300, 20)),
            Thresholds(0, 95),
            PASSED,
            "+44 requests and -44 snapshots cost 0 KV tokens",
        ),
        (
            "more requests by the server's default, as snapshots leave more",
            candidate(15_600, 512, 32, Asked(None, 32)),
            Thresholds(0, 95),
            PASSED,
            "512 sequences, 244 are required (95 % of the baseline 256 on H200); +256 requests "
            "and -32 snapshots cost 4480 KV tokens",
        ),
        (
            "fewer of them are no less a loss",
            candidate(20_000, 128, 32, Asked(None, 32)),
            Thresholds(0, 95),
            REJECTED,
            "128 sequences, 244 are required",
        ),
        (
            "snapshots alone give up no sequence",
            candidate(19_000, 192, 128, Asked(256, 128)),
            Thresholds(0, 95),
            REJECTED,
            "52 short; +64 snapshots cost 1280 KV tokens",
        ),
        (
            "a server that keeps no state any more",
            candidate(19_000, None),
            Thresholds(0, 95, min_sequences=300),
            PASSED,
            "sequences are not bounded: no layer of it keeps a recurrent state",
        ),
    ],
)
def test_both_capacities_are_held_but_for_what_the_spec_trades(
    what: str, found: Candidate, policy: Thresholds, result: GateResult, text: str
) -> None:
    by_default = found.asked.requests is None
    baseline = replace(BASELINE, asked=Asked(None, 64)) if by_default else BASELINE
    verdict = evaluate(found, baseline, policy)
    assert verdict.result is result, (what, verdict.message)
    assert text in verdict.message
    (replica,) = found.replicas
    slots = replica.slots
    expected = slots and slots.sequences
    assert (verdict.sequences and verdict.sequences.measured) == expected


def test_a_baseline_without_sequences_is_compared_in_tokens_alone() -> None:
    """As an earlier operator stored it."""
    before = replace(BASELINE, slots={})
    verdict = evaluate(candidate(19_000, 8), before, Thresholds(0, 95))
    assert verdict.result is PASSED
    assert "8 sequences, none are required; sequences are not compared: the baseline has none" in (
        verdict.message
    )
    assert evaluate(candidate(18_999, 8), before, Thresholds(0, 95)).result is REJECTED
    few = evaluate(candidate(19_000, 8), before, Thresholds(0, 95, min_sequences=9))
    assert few.result is REJECTED and "spec.capacity.minSequences): 1 short" in few.message


def test_another_model_is_compared_in_neither() -> None:
    other = replace(candidate(9, 8), group=ComparisonGroup("hf://org/other", 1))
    assert evaluate(other, BASELINE, Thresholds(0, 95)).result is HELD
    assert evaluate(other, BASELINE, Thresholds(9, 95)).result is PASSED
    few = evaluate(other, BASELINE, Thresholds(9, 95, min_sequences=9))
    assert few.result is REJECTED and few.sequences == Sequences(8, 9, 0)


def test_states_of_another_dtype_are_compared_in_neither() -> None:
    """Fewer sequences are no loss and more no gain, by the dtype's name."""
    other = replace(candidate(9, 512), group=replace(GROUP, state_dtype="bfloat16"))
    held = evaluate(other, BASELINE, Thresholds(0, 95))
    assert held.result is HELD and "spec.engine.stateDtype is bfloat16, not float32" in held.message
    few = replace(candidate(9, 8), group=other.group)
    assert evaluate(few, BASELINE, Thresholds(9, 95)).result is PASSED
    assert evaluate(few, BASELINE, Thresholds(9, 95, min_sequences=9)).result is REJECTED
    back = replace(BASELINE, group=other.group)
    assert "is float32, not bfloat16" in evaluate(candidate(9, 8), back, Thresholds(0, 95)).message
    assert evaluate(replace(other, promoted=True), BASELINE, Thresholds(0, 95)).result is PASSED


def test_a_spec_s_trade_is_known_before_a_replica_is_measured() -> None:
    """So the gate file that the first pod starts with has it."""
    unmeasured = replace(candidate(1, 1, asked=Asked(512, 64)), replicas=())
    limits = thresholds(unmeasured, BASELINE, Thresholds(0, 95))
    assert limits.baseline == {"H200": 14_880} and limits.sequences == {}
    by_default = replace(unmeasured, asked=Asked(256, None))
    assert thresholds(by_default, BASELINE, Thresholds(0, 95)).baseline == BASELINE.tokens
    assert Asked(512).expected(BEFORE) == Slots(512, 64, SLOT)
    assert Asked(8).expected(BEFORE) == Slots(8, 16, SLOT)
    assert Asked(None, 0).expected(BEFORE) == Slots(256, 0, SLOT)


counts = st.integers(1, 600)


@given(counts, counts, counts, counts, st.booleans(), st.booleans())
def test_a_trade_is_what_the_spec_changed_and_nothing_else(
    running: int, now: int, kept: int, keeps: int, ask_running: bool, ask_kept: bool
) -> None:
    old = Asked(running, kept)
    new = Asked(now if ask_running else running, keeps if ask_kept else kept)
    trade = Trade.of(Slots(running, kept, SLOT), Slots(now, keeps, SLOT), old, new, EACH)
    if new == old:
        assert (trade.requests, trade.snapshots, trade.tokens, trade.text) == (0, 0, 0, "")
    if not ask_running:
        assert trade.requests == 0
    assert trade.tokens * EACH == (trade.requests + trade.snapshots) * SLOT


@given(st.integers(1, 30_000), counts, st.integers(0, 20_000), st.integers(0, 600))
def test_the_gate_file_keeps_out_what_the_verdict_rejects(
    tokens: int, sequences: int, minimum: int, few: int
) -> None:
    found, policy = candidate(tokens, sequences), Thresholds(minimum, 95, min_sequences=few)
    verdict = evaluate(found, BASELINE, policy)
    gate = thresholds(found, BASELINE, policy).gate(True)
    pod = hybrid_pod(tokens, sequences)
    assert pod.result is not None
    assert gate.admits(pod.result, "H200") == (verdict.result is PASSED)
    assert Thresholds(minimum).gate(True) == GateFile(1, True, minimum)


STATE = RevisionState(
    accepted=3, baseline={"H200": 20_000}, slots={"H200": BEFORE}, bytes_per_token=EACH
)


def accepted(found: Candidate) -> RevisionState:
    policy = Thresholds(0, 95)
    verdict = evaluate(found, BASELINE, policy)
    assert verdict.result is PASSED
    plan, limits = RolloutPlan({"b": 1}, "b", gate=verdict), thresholds(found, BASELINE, policy)
    states = {"a": STATE, "b": RevisionState()}
    return updated(states, plan, "b", found.replicas, limits=limits, asked=found.asked)["b"]


def test_an_accepted_revision_is_the_measure_without_what_was_traded() -> None:
    """Else the next change would be rejected for a loss that its spec has not made."""
    alike = accepted(candidate(19_500, 256))
    assert alike.baseline == {"H200": 20_000} and alike.slots == {"H200": BEFORE}
    traded = accepted(candidate(14_200, 512, asked=Asked(512, 64)))
    assert traded.baseline == {"H200": 14_880}
    assert traded.slots == {"H200": replace(BEFORE, sequences=512)}
    fewer = accepted(candidate(25_000, 128, asked=Asked(128, 64)))
    assert fewer.baseline == {"H200": 25_000}
    assert fewer.slots == {"H200": replace(BEFORE, sequences=128)}
    text = revision_state.to_annotations(fewer)
    assert revision_state.read({"metadata": {"annotations": text}}) == fewer


MIXED = {"H200": BEFORE, "L4": BEFORE}


def mixed(asked: Asked, sequences: int, tokens: int, snapshots: int = 64) -> RevisionState:
    """Accepted by replicas on one of two GPU models with a baseline."""
    before = replace(STATE, baseline={"H200": 20_000, "L4": 9000}, slots=MIXED)
    measure = replace(BASELINE, tokens=before.baseline, slots=MIXED)
    found = candidate(tokens, sequences, snapshots, asked)
    limits = thresholds(found, measure, Thresholds(0, 95))
    plan = RolloutPlan({"b": 1}, "b", gate=evaluate(found, measure, Thresholds(0, 95)))
    states = {"a": before, "b": RevisionState()}
    return updated(states, plan, "b", found.replicas, limits=limits, asked=asked)["b"]


def test_a_gpu_model_without_a_replica_keeps_what_it_is_expected_to_have() -> None:
    """Its tokens are without the trade, and its slots with it: changed back, both are as before."""
    fewer = mixed(Asked(256, 0), 256, 21_280, 0)
    assert fewer.baseline == {"H200": 21_280, "L4": 10_280}
    assert fewer.slots == {"H200": Slots(256, 0, SLOT), "L4": Slots(256, 0, SLOT)}
    more = mixed(Asked(300, 64), 300, 19_500)
    assert more.baseline["L4"] == 9000 - 44 * 20
    assert more.slots == {"H200": Slots(300, 64, SLOT), "L4": Slots(300, 64, SLOT)}
    chosen = mixed(Asked(None, 64), 128, 22_560)
    assert chosen.slots == {"H200": Slots(128, 64, SLOT), "L4": BEFORE}


def test_slots_changed_back_and_forth_leave_the_baseline_as_it_was() -> None:
    few = Asked(128, 64)
    found = candidate(22_560, 128, asked=few)
    limits = thresholds(found, BASELINE, Thresholds(0, 95))
    assert limits.baseline == {"H200": 22_560}
    between = Baseline(GROUP, EACH, dict(limits.baseline), {"H200": Slots(128, 64, SLOT)}, few)
    back = thresholds(candidate(20_000, 256), between, Thresholds(0, 95))
    assert back.baseline == BASELINE.tokens


def test_the_best_sequences_are_kept_and_a_promotion_begins_anew() -> None:
    (less,) = candidate(20_000, 250).replicas
    after = updated({"a": STATE}, RolloutPlan({"a": 1}, "a"), "a", (less,))["a"]
    assert after.slots == {"H200": BEFORE}
    plan = RolloutPlan({"a": 1}, "a")
    anew = updated({"a": STATE}, plan, "a", (less,), promote="a")["a"]
    assert anew.slots == {"H200": replace(BEFORE, sequences=250)}
    plain = Measured("H200", 20_000, EACH)
    first = replace(STATE, slots=None)
    none = updated({"a": first}, RolloutPlan({"a": 1}, "a"), "a", (plain,))["a"]
    assert none.slots is None and "slots" not in str(revision_state.to_annotations(none))


def test_a_rejection_for_sequences_counts_by_the_policy_of_today() -> None:
    verdict = evaluate(candidate(25_000, 192), BASELINE, Thresholds(0, 95, min_sequences=200))
    state = RevisionState(verdict=StoredVerdict.of(verdict, 3))
    for policy in (Thresholds(0, 95), Thresholds(min_sequences=193)):
        assert current_verdict(state, STATE, policy) is not None
    for policy in (Thresholds(0, 75), Thresholds(min_sequences=192)):
        assert current_verdict(state, STATE, policy) is None


def test_a_status_has_both_and_the_lesser_of_them() -> None:
    made = service_state(hybrid_pod(4096, 3), hybrid_pod(8192, 3, name="b"))
    out, _ = status.build(made, {}, "now")
    capacity = out["capacity"]
    figures = ("kvTokens", "sequences", "snapshots", "slotBytes", "fullLengthSequences")
    assert [capacity[key] for key in figures] == [4096, 3, 64, 4096, 3]
    assert [item["sequences"] for item in out["replicaSizing"]] == [3, 3]
    assert out["effective"]["engine"]["prefixSnapshots"] == 64
    plain, _ = status.build(service_state(ready_pod()), {}, "now")
    assert not {"sequences", "snapshots", "slotBytes"} & set(plain["capacity"])
    assert "sequences" not in plain["replicaSizing"][0]
    assert "prefixSnapshots" not in effective(service_state(ready_pod()))["engine"]


def test_a_status_has_the_dtype_of_states_and_what_the_other_one_would_take() -> None:
    """As a replica reports it: a server before there was a choice does not."""
    made = service_state(hybrid_pod(state_dtype="float32", bfloat16_slot_bytes=2100))
    out, _ = status.build(made, {}, "now")
    assert out["capacity"]["stateDtype"] == "float32"
    assert out["capacity"]["bfloat16SlotBytes"] == 2100
    assert out["effective"]["engine"]["stateDtype"] == "float32"
    assert slots(out).endswith("MiB each in float32")
    small = service_state(
        hybrid_pod(state_dtype="bfloat16"), spec={"engine": {"stateDtype": "bfloat16"}}
    )
    out, _ = status.build(small, {}, "now")
    assert out["capacity"]["stateDtype"] == out["effective"]["engine"]["stateDtype"] == "bfloat16"
    assert "bfloat16SlotBytes" not in out["capacity"] and slots(out).endswith("in bfloat16")
    before, _ = status.build(service_state(hybrid_pod()), {}, "now")
    assert "stateDtype" not in before["capacity"] | before["effective"]["engine"]
    assert slots(before).endswith("MiB each")
    pods = hybrid_pod(state_dtype="float32"), hybrid_pod()
    now, old = (CapacityStatus.of([pod.report]) for pod in pods)
    kept = retained(old, now, "t")
    assert kept is not None and kept.state_dtype == "float32", "an upgrade of the server adds it"


def test_the_fewest_sequences_are_shown_whichever_replica_has_them() -> None:
    """Not those of the replica with the fewest KV tokens."""
    few, many = hybrid_pod(8192, 2, name="b"), hybrid_pod(4096, 3)
    assert few.result is not None and many.result is not None
    made = CapacityStatus.of([many.report, few.report])
    assert made is not None and (made.kv_tokens, made.sequences) == (4096, 2)
    assert made.full_length_sequences == 2
    assert CapacityStatus.of([few.report, many.report]) == made


def test_what_an_earlier_operator_kept_gets_its_sequences() -> None:
    now = CapacityStatus.of([hybrid_pod().report])
    assert now is not None
    before = replace(now, sequences=None, snapshots=None, slot_bytes=None)
    kept = retained(before, now, "t")
    assert kept is not None and kept.slots == Slots(256, 64, 4096)
    assert before.slots is None and retained(kept, now, "t") == kept


def test_too_few_sequences_are_named_with_what_to_raise() -> None:
    few = replace(hybrid_pod(4096, 8), ready=False)
    spec = {"capacity": {"minSequences": 9}}
    found = by_type(service_state(few, spec=spec))["CapacitySufficient"]
    assert found.reason == "BelowMinimum"
    assert found.message.endswith(
        "measured 8 sequences, 9 are required (spec.capacity.minSequences): 1 short, it takes no "
        "traffic; lower that, or raise spec.engine.maxRunningRequests"
    )
    assert status.replica_state(few, Thresholds(min_sequences=9)) == "BelowMinimum"
    assert status.replica_state(few, Thresholds(min_sequences=8)) == "GateClosed"
    enough = by_type(service_state(hybrid_pod(4096, 9), spec=spec))["CapacitySufficient"]
    assert enough.message.endswith("; 9 sequences, 9 are required (spec.capacity.minSequences)")
    plain = by_type(service_state(ready_pod(), spec=spec))["CapacitySufficient"]
    assert plain.status == "True" and "minSequences asks nothing" in plain.message
    short = replace(hybrid_pod(900), ready=False)
    text = by_type(service_state(short))["CapacitySufficient"].message
    assert "maxPrefillTokens, maxRunningRequests or prefixSnapshots" in text


def test_a_stable_revision_with_fewer_sequences_than_its_baseline_says_so() -> None:
    kept = RevisionState(accepted=1, baseline={"": 4096}, slots={"": Slots(256, 64, 4096)})
    found = by_type(service_state(hybrid_pod(4096, 128), stable_state=kept))["CapacityStable"]
    assert (found.status, found.reason) == ("False", "BelowBaseline")
    assert "128 sequences, 244 are expected (95 % of the baseline 256 on a CPU): 116 short" in (
        found.message
    )


def test_a_spec_s_baseline_has_what_it_asked_for() -> None:
    engine = {"maxRunningRequests": 256, "prefixSnapshots": 0}
    inputs = parse({**BODY, "spec": {**BODY["spec"], "engine": engine}}).inputs
    made = baseline_of(STATE, inputs)
    assert made.asked == Asked(256, 0) and made.slots == {"H200": BEFORE}
    assert not made.asked.pinned
    assert Asked.of({"engine": engine, "capacity": {"kvTokens": 4096}}).pinned
    assert not Asked.of({"engine": engine, "capacity": {"minKVTokens": 4096}}).pinned


def printed(what: Any) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_a_terminal_shows_sequences_where_a_service_has_them() -> None:
    bodies = []
    for name, pod in (("hybrid", hybrid_pod(4096, 3)), ("plain", ready_pod())):
        out, _ = status.build(service_state(pod), {}, "2026-11-22T00:00:00Z")
        out["capacity"]["measuredAt"] = "2026-11-22T00:00:00Z"
        bodies.append({**BODY, "metadata": {**BODY["metadata"], "name": name}, "status": out})
    lines = printed(show.services(bodies, False)).splitlines()
    assert lines[0].split("FULL SEQS")[1].split()[0] == "SEQUENCES"
    assert lines[1].split()[6:8] == ["3", "3"] and lines[2].split()[6:8] == ["4", "-"]
    assert "SEQUENCES" not in printed(show.services(bodies[1:], False))
    text = printed(show.service(bodies[0]))
    assert "3 sequences at once and 64 snapshots of prefixes, 0.0 MiB each" in text


def test_a_comparison_has_slots_where_a_choice_has_them() -> None:
    found = {"given": hybrid_pod(4096, 3).report, "less": hybrid_pod(8192, 1, 0).report}
    shown = {name: made for name, made in found.items() if made is not None}
    head, whole, less = printed(show.comparison(shown)).splitlines()[:3]
    assert head.split()[-2:] == ["SEQUENCES", "SNAPSHOTS"]
    assert whole.split()[-3:] == ["3", "3", "64"] and less.split()[-3:] == ["1", "1", "-"]
    (first, _) = shown.values()
    assert "3 full-length sequences of 1,024; 3 sequences at once" in printed(show.sized(first))
