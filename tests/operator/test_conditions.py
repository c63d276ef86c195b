"""What a person reads: conditions and events for every state a service can be in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvline_contract.exits import MEANINGS
from kvline_contract.launch import Record
from kvline_contract.report import (
    Attempt,
    Effective,
    Memory,
    Outcome,
    Result,
    SizingReport,
    Source,
    State,
    Termination,
)
from kvline_operator import status
from kvline_operator.conditions import Condition, Facts, conditions
from kvline_operator.gate import Outcome as GateOutcome
from kvline_operator.gate import Verdict
from kvline_operator.observe import Ended, PodView
from kvline_operator.records import merge
from kvline_operator.rollout import RolloutPlan
from kvline_operator.spec import parse
from kvline_operator.verdicts import Standing

BODY = {
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3},
    "spec": {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi"},
        "replicas": 1,
        "capacity": {"minKVTokens": 1000},
    },
}
PLAIN = PodView(
    name="chat-aaaaa-1",
    uid="u1",
    node="n1",
    revision="aaaaa",
    ready=False,
    running=False,
    downloading=False,
    restarts=0,
    waiting_reason="",
    waiting_message="",
    unschedulable="",
    ended=None,
    download_ended=None,
    report=None,
    report_error="",
    report_invalid=False,
)


def report(state: State, tokens: int = 4096, attempts: int = 1) -> SizingReport:
    result = None
    if state is State.VALIDATED:
        memory = Memory(100, 20, 10, 0, 50, 10, 10)
        result = Result(tokens, 512, Source.MEASURED, "f" * 32, 90, 6000, 0, "t", memory)
    made = tuple(Attempt(n, tokens, Outcome.SURVIVED, 5) for n in range(attempts + 1))
    effective = Effective(1024, 4, 512, 20, 128, 16, 64)
    return SizingReport(1, "u1", "p", "aaaaa", 1, state, "t", "t", effective, (), made, result)


def ready_pod(tokens: int = 4096, name: str = "chat-aaaaa-1", **more: Any) -> PodView:
    made = report(State.VALIDATED, tokens)
    return replace(PLAIN, name=name, ready=True, running=True, report=made, **more)


def recorded() -> dict[str, Record]:
    """What ready_pod() leaves on record."""
    made = report(State.VALIDATED).result
    assert made is not None
    return merge({}, [made])


def facts(*pods: PodView, spec: dict[str, Any] | None = None, **more: Any) -> Facts:
    body = {**BODY, "spec": {**BODY["spec"], **(spec or {})}}
    more.setdefault("plan", RolloutPlan({"aaaaa": 1}, "aaaaa"))
    return Facts(parse(body), pods=pods, **more)


def by_type(made: Facts) -> dict[str, Condition]:
    return {c.type: c for c in conditions(made)}


def ended(code: int, reason: str = "Error", message: str = "why") -> Ended:
    termination = Termination(1, code, "name", message)
    return Ended(code, reason, termination, message)


def test_a_serving_replica() -> None:
    got = by_type(facts(ready_pod(), records=recorded()))
    assert {k: c.status for k, c in got.items()} == dict.fromkeys(got, "True")
    assert got["Ready"].reason == "Serving"
    assert got["UpToDate"].reason == "UpToDate"


def test_up_to_date_is_the_newest_revision_alone() -> None:
    left = replace(ready_pod(), name="old", revision="00000")
    got = by_type(facts(ready_pod(), left))
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("False", "RollingOut")
    assert "1 of another" in got["UpToDate"].message


@pytest.mark.parametrize("state", [s for s in State if s not in (State.VALIDATED, State.FAILED)])
def test_each_stage_shows_as_the_reason(state: State) -> None:
    got = by_type(facts(replace(PLAIN, running=True, report=report(state))))
    assert got["CapacityMeasured"].reason == str(state)
    assert got["Ready"] == Condition("Ready", "False", str(state), got["Ready"].message)


def test_the_replica_furthest_along_speaks() -> None:
    loading = replace(PLAIN, running=True, report=report(State.LOADING))
    further = replace(PLAIN, name="b", running=True, report=report(State.VALIDATING))
    assert by_type(facts(loading, further))["CapacityMeasured"].reason == "Validating"


def test_too_little_names_both_figures_and_the_knobs() -> None:
    small = replace(ready_pod(900), ready=False)
    got = by_type(facts(small))
    assert got["CapacityMeasured"].status == "True"
    assert got["CapacitySufficient"].reason == "BelowMinimum"
    text = got["Ready"].message
    assert "900" in text and "1000" in text and "100 short" in text and "memory" in text
    assert status.replica_state(small, 1000) == "BelowMinimum"


@pytest.mark.parametrize("code", [c for c in MEANINGS if c])
def test_every_exit_code_becomes_its_condition(code: int) -> None:
    """F31: the reason stands through restarts until the replica is validated."""
    meaning = MEANINGS[code]
    crashed = replace(PLAIN, ended=ended(code), restarts=3)
    again = replace(crashed, running=True, report=report(State.LOADING))
    for pod in (crashed, again):
        condition = by_type(facts(pod))[meaning.condition]
        assert (condition.status, condition.reason) == ("False", meaning.reason)
        assert condition.message == "why"
    recovered = replace(ready_pod(), ended=ended(code))
    assert by_type(facts(recovered))["Ready"].reason == "Serving"


@pytest.mark.parametrize(
    ("restarts", "reason"), [(1, "ShrunkRetry"), (4, "ShrunkRetry"), (5, "OutOfMemory")]
)
def test_kills_for_memory_while_sizing_are_retries_then_a_failure(
    restarts: int, reason: str
) -> None:
    killed = Ended(137, "OOMKilled", None, "")
    got = by_type(facts(replace(PLAIN, ended=killed, restarts=restarts)))
    assert got["CapacityMeasured"].reason == reason
    assert "memory limit" in got["CapacityMeasured"].message


@pytest.mark.parametrize(
    ("pod", "kind", "reason"),
    [
        (replace(PLAIN, unschedulable="0/1 nodes"), "Progressing", "Unschedulable"),
        (replace(PLAIN, waiting_reason="ImagePullBackOff"), "Progressing", "ImagePullFailed"),
        (
            replace(
                PLAIN, waiting_reason="CreateContainerConfigError", waiting_message="no secret hf"
            ),
            "ModelAvailable",
            "SecretMissing",
        ),
        (replace(PLAIN, downloading=True), "ModelAvailable", "Downloading"),
        (replace(PLAIN, download_ended=ended(33)), "ModelAvailable", "DownloadFailed"),
        (replace(PLAIN, running=True), "CapacityMeasured", "ReportMissing"),
        (
            replace(PLAIN, running=True, report_error="NaN", report_invalid=True),
            "CapacityMeasured",
            "ReportInvalid",
        ),
        (PLAIN, "CapacityMeasured", "Pending"),
    ],
)
def test_what_stands_in_the_way_is_the_reason(pod: PodView, kind: str, reason: str) -> None:
    got = by_type(facts(pod))
    assert got[kind].reason == reason
    assert got[kind].status != "True"
    assert got["Ready"].status == "False"


def test_scaled_to_zero_is_a_state_of_its_own() -> None:
    got = by_type(facts(spec={"replicas": 0}))
    assert got["Ready"] == Condition("Ready", "False", "ScaledToZero", "no replica is asked for")
    assert got["UpToDate"].status == "True"
    assert got["CapacityMeasured"].reason == "ScaledToZero"


HELD = Verdict(GateOutcome.HOLD, "b: Probing")
STUCK = Verdict(GateOutcome.HOLD, "b has no node", stuck=True)
FAILED = Verdict(
    GateOutcome.FAIL, "measured 9 KV tokens, 950 are required: 941 short", 9, 950, 1000
)
PASSED = Verdict(GateOutcome.PASS, "measured 990 KV tokens, 950 are required", 990, 950, 1000)


@pytest.mark.parametrize(
    ("gate", "rejected", "paused", "reason", "said"),
    [
        (HELD, False, False, "RollingOut", "is measured before it takes traffic: b: Probing"),
        (STUCK, False, False, "GateHeld", "b has no node"),
        (PASSED, False, False, "RollingOut", "takes over: 0 of 1 replicas are ready"),
        (PASSED, False, True, "Paused", "kvline.dev/paused is true"),
        (FAILED, False, False, "GateFailed", "is kept out of traffic, aaaaa serves"),
        (FAILED, True, False, "RolledBack", "was turned down, aaaaa serves: measured 9 KV tokens"),
    ],
)
def test_a_candidate_leaves_ready_true_and_says_why_it_does_not_serve(
    gate: Verdict, rejected: bool, paused: bool, reason: str, said: str
) -> None:
    candidate = replace(
        PLAIN, name="b", revision="bbbbb", running=True, report=report(State.PROBING)
    )
    name = {"rejected" if rejected else "candidate": "bbbbb"}
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=gate, paused=paused, **name)
    got = by_type(facts(ready_pod(), candidate, plan=plan))
    assert got["Ready"].status == "True"
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("False", reason)
    assert said in got["UpToDate"].message


def test_a_gate_s_verdict_is_told_once_with_its_figures() -> None:
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=FAILED, rejected="bbbbb")
    made, news = status.build(facts(ready_pod(), plan=plan), {}, "now")
    assert [n.reason for n in news if "Gate" in n.reason or "Rolled" in n.reason] == [
        "GateFailed",
        "RolledBack",
    ]
    assert made["rollout"]["gate"] == {
        "revision": "bbbbb",
        "result": "Fail",
        "measured": 9,
        "required": 950,
        "baseline": 1000,
        "message": FAILED.message,
        "time": "now",
    }
    again, silent = status.build(facts(ready_pod(), plan=plan), made, "later")
    assert again == made and not silent
    taken_back, quiet = status.build(
        facts(ready_pod(), standing=Standing(accepted=2, verdict="Passed", message="enough")),
        made,
        "later",
    )
    assert taken_back["rollout"]["gate"]["result"] == "Pass"
    assert not [n for n in quiet if n.reason == "GatePassed"], "that was told when it passed"


def test_the_deadline_and_quota_show() -> None:
    assert by_type(facts(PLAIN, deadline_exceeded=True))["Progressing"].reason == "DeadlineExceeded"
    quota = Condition("Progressing", "False", "QuotaExceeded", "pods: 5 of 5")
    assert by_type(facts(PLAIN, apply_error=quota))["Progressing"] == quota


def test_a_size_away_from_its_record_is_told() -> None:
    kept = recorded()
    assert by_type(facts(ready_pod()))["CapacityStable"].reason == "NoRecord"
    assert by_type(facts(ready_pod(4000), records=kept))["CapacityStable"].reason == "Stable"
    other = by_type(facts(ready_pod(), ready_pod(3900, "chat-aaaaa-2"), records=kept))
    assert other["CapacityStable"].reason == "Drifted"
    assert "chat-aaaaa-2 measured 3900" in other["CapacityStable"].message
    assert other["Ready"].status == "True"


def test_capacity_is_that_of_the_smallest_replica() -> None:
    made = facts(ready_pod(4096), ready_pod(4000, name="b"), spec={"replicas": 2})
    out, _ = status.build(made, {}, "now")
    assert out["capacity"]["kvTokens"] == 4000
    assert out["capacity"]["kvTokensTotal"] == 8096
    assert out["capacity"]["spread"] == {"min": 4000, "max": 4096}
    assert out["capacity"]["fullLengthSequences"] == 3
    assert [r["kvTokens"] for r in out["replicaSizing"]] == [4000, 4096]


def test_an_unready_replica_gives_no_capacity() -> None:
    out, _ = status.build(facts(replace(ready_pod(), ready=False)), {}, "now")
    assert "capacity" not in out
    assert out["replicaSizing"][0]["state"] == "GateClosed"


def test_at_most_sixteen_replicas_are_listed_worst_first() -> None:
    pods = [ready_pod(5000 + i, name=f"p{i}") for i in range(20)]
    out, _ = status.build(facts(*pods, replace(PLAIN, name="bad")), {}, "now")
    assert len(out["replicaSizing"]) == 16
    assert out["replicaSizing"][0]["pod"] == "bad"


def test_one_event_a_transition_with_its_figures() -> None:
    made = facts(ready_pod())
    first, news = status.build(made, {}, "t1")
    assert {e.reason for e in news} == {"CapacityValidated", "Serving"}
    assert "4096" in news[0].message
    again, none = status.build(made, first, "t2")
    assert none == []
    assert again == first  # transition times stay, so nothing is written


def test_a_forged_status_is_rewritten() -> None:
    """C24: neither figures nor conditions of it come through."""
    forged = {
        "capacity": {"kvTokens": 10**9},
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "Evil"}],
    }
    out, _ = status.build(facts(PLAIN), forged, "now")
    assert "capacity" not in out
    assert {c["type"] for c in out["conditions"]} == {
        "Accepted",
        "ModelAvailable",
        "CapacityMeasured",
        "CapacitySufficient",
        "CapacityStable",
        "Progressing",
        "UpToDate",
        "Ready",
    }


def test_a_refused_spec_leaves_a_serving_one_ready() -> None:
    serving, _ = status.build(facts(ready_pod()), {}, "t1")
    wrong = Condition("Accepted", "False", "SpecInvalid", "spec.model.source …")
    body = {"metadata": {"generation": 4}, "status": serving}
    out, news = status.refused(wrong, body, "t2")
    found = {c["type"]: c["status"] for c in out["conditions"]}
    assert (found["Accepted"], found["Ready"]) == ("False", "True")
    assert out["capacity"] == serving["capacity"]
    assert [e.reason for e in news] == ["SpecInvalid"]
