"""Conditions and events for every state that a service can be in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvline_contract.exits import ExitCode
from kvline_contract.launch import Record
from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    Attempt,
    Binding,
    Current,
    Direction,
    Effective,
    Knob,
    Outcome,
    Result,
    SizingReport,
    Source,
    Stage,
    State,
    Termination,
)
from kvline_operator import candidate, revision_state, status
from kvline_operator.capacity_status import CapacityStatus, retained
from kvline_operator.conditions import conditions
from kvline_operator.ended_pods import EndedPod
from kvline_operator.gate import GateResult, Verdict
from kvline_operator.observe import Ended, PodView
from kvline_operator.prepare import Preparation
from kvline_operator.records import merge
from kvline_operator.revision_state import RevisionState
from kvline_operator.rollout import RolloutPlan
from kvline_operator.service_state import Condition, ServiceState
from kvline_operator.spec import parse
from kvline_operator.threshold import Thresholds

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
        memory = MemoryV1(100, 20, 10, 0, 50, 10, 10).upgraded()
        result = Result(tokens, 512, Source.MEASURED, "f" * 32, 90, 6000, 0, "t", (memory,))
    made = tuple(Attempt(n, tokens, Outcome.SURVIVED, 5) for n in range(attempts + 1))
    effective = Effective(1024, 4, 512, 20, 128, 16, 64)
    return SizingReport("u1", "p", "aaaaa", 1, state, "t", "t", effective, (), made, result)


def ready_pod(tokens: int = 4096, name: str = "chat-aaaaa-1", **more: Any) -> PodView:
    made = report(State.VALIDATED, tokens)
    return replace(PLAIN, name=name, ready=True, running=True, report=made, **more)


def recorded() -> dict[str, Record]:
    """The record that ready_pod() leaves."""
    return merge({}, [report(State.VALIDATED)])


def service_state(*pods: PodView, spec: dict[str, Any] | None = None, **more: Any) -> ServiceState:
    body = {**BODY, "spec": {**BODY["spec"], **(spec or {})}}
    more.setdefault("plan", RolloutPlan({"aaaaa": 1}, "aaaaa"))
    spec_ = parse(body)
    more.setdefault("limits", Thresholds(spec_.min_kv_tokens))
    return ServiceState(spec_, pods=pods, **more)


def by_type(made: ServiceState) -> dict[str, Condition]:
    return {c.type: c for c in conditions(made)}


def ended(code: int, reason: str = "Error", message: str = "why") -> Ended:
    termination = Termination(1, code, "name", message)
    return Ended(code, reason, termination, message)


def test_a_serving_replica() -> None:
    got = by_type(service_state(ready_pod(), records=recorded()))
    assert {k: c.status for k, c in got.items()} == dict.fromkeys(got, "True")
    assert got["Ready"].reason == "Serving"
    assert got["UpToDate"].reason == "UpToDate"


def test_up_to_date_is_the_newest_revision_alone() -> None:
    left = replace(ready_pod(), name="old", revision="00000")
    got = by_type(service_state(ready_pod(), left))
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("False", "RollingOut")
    assert "1 replicas of others" in got["UpToDate"].message


@pytest.mark.parametrize("state", [s for s in State if s not in (State.VALIDATED, State.FAILED)])
def test_each_stage_shows_as_the_reason(state: State) -> None:
    got = by_type(service_state(replace(PLAIN, running=True, report=report(state))))
    assert got["CapacityMeasured"].reason == str(state)
    assert got["Ready"] == Condition("Ready", "False", str(state), got["Ready"].message)


def test_a_load_says_how_far_it_is_in_steps_that_bound_its_writes() -> None:
    texts = []
    for done in range(0, 140_001, 10):
        stage = Stage("load", 1, done << 20, total_bytes=140_000 << 20)
        loading = replace(report(State.LOADING), stages=(stage,))
        got = by_type(service_state(replace(PLAIN, running=True, report=loading)))
        texts.append(got["CapacityMeasured"].message)
    assert texts[0] == "loading 0 of 140,000 MiB"
    assert texts[1234] == "loading 11,200 of 140,000 MiB"
    assert texts[-1] == "loading 140,000 of 140,000 MiB"
    assert len(set(texts)) == 51


def test_a_start_changes_its_condition_once_a_stage() -> None:
    """Not with its seconds, steps or bytes, and without «sizing»."""
    texts = []
    for number, state in ((1, State.LOADING), (3, State.STRESSING), (4, State.VALIDATING)):
        for step in range(1, 60):
            current = Current(number, 4, f"does {state}", f"t{number}", step, 60, f"s{step}", "t")
            stage = Stage("load", step, step << 20, total_bytes=60 << 20)
            made = replace(report(state), current=current, stages=(stage,), updated_at=f"t{step}")
            got = by_type(service_state(replace(PLAIN, running=True, report=made)))
            assert got["CapacityMeasured"].reason == str(state)
            texts.append(got["CapacityMeasured"].message)
    assert list(dict.fromkeys(texts)) == [
        "stage 1 of 4: does Loading, since t1",
        "stage 3 of 4: does Stressing, since t3",
        "stage 4 of 4: does Validating, since t4",
    ]


@pytest.mark.parametrize("state", [s for s in State if s not in (State.VALIDATED, State.FAILED)])
def test_a_server_that_does_not_report_what_it_does_is_described_by_its_state(state: State) -> None:
    bare = replace(report(state), attempts=())
    got = by_type(service_state(replace(PLAIN, running=True, report=bare)))
    assert got["CapacityMeasured"].message not in ("", "sizing")


def test_the_replica_furthest_along_speaks() -> None:
    loading = replace(PLAIN, running=True, report=report(State.LOADING))
    further = replace(PLAIN, name="b", running=True, report=report(State.VALIDATING))
    assert by_type(service_state(loading, further))["CapacityMeasured"].reason == "Validating"


def test_too_little_names_both_figures_and_the_knobs() -> None:
    small = replace(ready_pod(900), ready=False)
    got = by_type(service_state(small))
    assert got["CapacityMeasured"].status == "True"
    assert got["CapacitySufficient"].reason == "BelowMinimum"
    text = got["Ready"].message
    assert "900" in text and "1000" in text and "100 short" in text and "memory" in text
    assert status.replica_state(small, 1000) == "BelowMinimum"


def test_an_accepted_revision_that_measures_less_serves_and_warns_with_both_figures() -> None:
    """A smaller GPU or another driver must not keep an accepted revision from serving: both figures
    are reported, and only minKVTokens is a threshold."""
    stable_state = RevisionState(
        accepted=2, baseline={"": 4096}, required=3892, bytes_per_token=512
    )
    made = service_state(ready_pod(2000), stable_state=stable_state, records={})
    got = by_type(made)
    assert got["Ready"].reason == "Serving"
    assert (got["CapacitySufficient"].status, got["CapacityStable"].status) == ("True", "False")
    stable = got["CapacityStable"]
    assert stable.reason == "BelowBaseline"
    assert "measured 2000 KV tokens, 3892 are expected (95 % of the baseline 4096" in stable.message
    assert "1892 short" in stable.message and "promote=aaaaa" in stable.message
    assert "1000 are required (spec.capacity.minKVTokens)" in got["CapacitySufficient"].message
    _, news = status.build(made, {}, "now")
    assert [n.message for n in news if n.reason == "BelowBaseline"] == [stable.message]
    lenient = service_state(
        ready_pod(2000), stable_state=stable_state, spec={"rollout": {"minCapacityPercent": 40}}
    )
    assert by_type(lenient)["CapacityStable"].reason == "NoRecord", "the policy of today counts"


def test_a_candidate_s_replica_that_the_gate_holds_back_names_what_binds_it() -> None:
    plan = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", FAILED)
    limits = Thresholds(0, 95, {"": 4096})
    short = replace(ready_pod(3000, "b"), ready=False, revision="bbbbb")
    got = by_type(service_state(ready_pod(), short, plan=plan, limits=limits))["CapacitySufficient"]
    assert (got.status, got.reason) == ("False", "BelowBaseline")
    assert "b measured 3000 KV tokens, 3892 are required (95 % of the baseline 4096" in got.message
    assert "892 short, it takes no traffic" in got.message
    held = replace(plan, gate=Verdict(GateResult.HELD, "cannot be compared", 3000, blocked=True))
    got = by_type(service_state(ready_pod(), short, plan=held, limits=Thresholds()))[
        "CapacitySufficient"
    ]
    assert (got.status, got.reason, got.message) == (
        "False",
        "NotComparable",
        "cannot be compared",
    )


@pytest.mark.parametrize("code", [c for c in ExitCode if c])
def test_every_exit_code_becomes_its_condition(code: ExitCode) -> None:
    """F31: the reason stands through restarts until the replica is validated."""
    crashed = replace(PLAIN, ended=ended(code), restarts=3)
    again = replace(crashed, running=True, report=report(State.LOADING))
    for pod in (crashed, again):
        condition = by_type(service_state(pod))[code.condition]
        assert (condition.status, condition.reason) == ("False", code.reason)
        assert condition.message == "why"
    if code.condition != "CapacityMeasured":
        pending = by_type(service_state(crashed))["CapacityMeasured"]
        assert pending.message == f"no container runs: the last one ended with {code.title}"
    recovered = replace(ready_pod(), ended=ended(code))
    assert by_type(service_state(recovered))["Ready"].reason == "Serving"


@pytest.mark.parametrize(
    ("kills", "reason"), [(1, "ShrunkRetry"), (4, "ShrunkRetry"), (5, "OutOfMemory")]
)
def test_kills_for_memory_while_sizing_are_retries_then_a_failure(kills: int, reason: str) -> None:
    killed = Ended(137, "OOMKilled", None, "")
    got = by_type(service_state(replace(PLAIN, ended=killed, restarts=9, oom_kills=kills)))
    assert got["CapacityMeasured"].reason == reason
    assert "memory limit" in got["CapacityMeasured"].message


def test_a_stable_replica_on_a_cpu_is_no_gpu_s_while_the_spec_asks_for_one() -> None:
    killed = replace(PLAIN, ended=Ended(137, "OOMKilled", None, ""), oom_kills=1)
    before = {"inputs": {"resources": {"memory": "2Gi"}}}
    found = by_type(service_state(killed, spec=GPU, stable_data=before))["CapacityMeasured"]
    assert found.reason == "ShrunkRetry"


def test_a_pod_that_waits_for_a_terminating_one_says_so_with_the_scheduler_s_words() -> None:
    waits = replace(PLAIN, unschedulable="0/1 nodes: Insufficient nvidia.com/gpu", awaits="old")
    found = by_type(service_state(waits))
    words = "has no node until old has left one: 0/1 nodes: Insufficient"
    assert (found["Progressing"].status, found["Progressing"].reason) == ("True", "RollingOut")
    assert words in found["Progressing"].message and words in found["Ready"].message
    assert not candidate.blocker(waits) and candidate.blocker(replace(waits, awaits=""))


def test_a_kill_for_host_memory_beside_a_gpu_is_no_smaller_retry() -> None:
    killed = replace(PLAIN, ended=Ended(137, "OOMKilled", None, ""), oom_kills=1)
    found = by_type(service_state(killed, spec=GPU))["CapacityMeasured"]
    assert found.reason == "OutOfMemory"
    assert "host memory, kill 1" in found.message
    assert "raise spec.resources.memory" in found.message


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
    got = by_type(service_state(pod))
    assert got[kind].reason == reason
    assert got[kind].status != "True"
    assert got["Ready"].status == "False"


def test_scaled_to_zero_is_a_state_of_its_own() -> None:
    got = by_type(service_state(spec={"replicas": 0}))
    assert got["Ready"] == Condition("Ready", "False", "ScaledToZero", "spec.replicas is 0")
    assert got["UpToDate"].status == "True"
    assert got["CapacityMeasured"].reason == "ScaledToZero"


HELD = Verdict(GateResult.HELD, "b: Probing")
STUCK = Verdict(GateResult.HELD, "b has no node", blocked=True)
FAILED = Verdict(
    GateResult.REJECTED, "measured 9 KV tokens, 950 are required: 941 short", 9, 950, 1000
)
PASSED = Verdict(GateResult.PASSED, "measured 990 KV tokens, 950 are required", 990, 950, 1000)


@pytest.mark.parametrize(
    ("gate", "rejected", "paused", "reason", "text"),
    [
        (HELD, False, False, "RollingOut", "is measured before it takes traffic: b: Probing"),
        (STUCK, False, False, "GateHeld", "b has no node"),
        (PASSED, False, False, "RollingOut", "is rolled out: 0 of 1 replicas are ready"),
        (PASSED, False, True, "Paused", "kvline.dev/paused is true"),
        (FAILED, False, False, "RevisionRejected", "is kept out of traffic, aaaaa serves"),
        (
            FAILED,
            True,
            False,
            "RevisionRejected",
            "was rejected, aaaaa serves: measured 9 KV tokens",
        ),
    ],
)
def test_a_candidate_leaves_ready_true_and_says_why_it_does_not_serve(
    gate: Verdict, rejected: bool, paused: bool, reason: str, text: str
) -> None:
    candidate = replace(
        PLAIN, name="b", revision="bbbbb", running=True, report=report(State.PROBING)
    )
    name = {"rejected" if rejected else "candidate": "bbbbb"}
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=gate, paused=paused, **name)
    state = service_state(ready_pod(), candidate, plan=plan)
    got = by_type(state)
    assert got["Ready"].status == "True"
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("False", reason)
    assert status.build(state, {}, "now")[0]["reason"] == reason, "what kubectl get shows"
    assert text in got["UpToDate"].message


@pytest.mark.parametrize("gate", [HELD, STUCK, FAILED])
@pytest.mark.parametrize("word", ["candidate", "rejected"])
def test_no_message_claims_that_something_serves_where_nothing_does(
    gate: Verdict, word: str
) -> None:
    """With Recreate no old replica serves while the new one is measured, held or rejected."""
    named: dict[str, Any] = {word: "bbbbb"}
    plan = RolloutPlan({"bbbbb": 1}, "aaaaa", gate=gate, **named)
    for pods in ((), (replace(ready_pod(), ready=False),)):
        got = by_type(service_state(*pods, plan=plan))
        assert "nothing serves" in got["UpToDate"].message
        assert "aaaaa serves" not in " ".join(c.message for c in got.values())
        assert got["Ready"].status == "False"


GPU = {"resources": {"memory": "16Gi", "gpus": 1}}
LOST = EndedPod("p1", "u", "aaaaa", "n1", "t2", "UnexpectedAdmissionError", "no healthy devices")


def test_pods_that_ended_for_good_are_counted_apart_and_named_while_replicas_are_missing() -> None:
    evicted = replace(LOST, reason="Evicted", message="low on memory")
    made, _ = status.build(service_state(ready_pod(), ended=(evicted, LOST)), {}, "now")
    assert (made["replicas"], made["readyReplicas"], made["endedPods"]) == (1, 1, 2)
    got = by_type(service_state(ready_pod(), ended=(evicted,)))
    assert (got["UpToDate"].status, got["Progressing"].reason) == ("True", "Complete")
    got = by_type(service_state(PLAIN, ended=(evicted, LOST)))
    assert "terminal pods: 2, the last one p1 on n1: Evicted: low on memory" in (
        got["Progressing"].message
    )


def test_a_gpu_that_a_node_cannot_give_is_a_device_failure_until_a_container_runs() -> None:
    """F34."""
    waiting = replace(PLAIN, created="t3")
    got = by_type(service_state(waiting, ended=(LOST,), spec=GPU))["Progressing"]
    assert (got.status, got.reason) == ("False", "DeviceFailure")
    assert "no healthy devices" in got.message
    assert by_type(service_state(waiting, ended=(LOST,)))["Progressing"].reason == "RollingOut", (
        "no GPU"
    )
    runs = replace(waiting, running=True)
    assert (
        by_type(service_state(runs, ended=(LOST,), spec=GPU))["Progressing"].reason == "RollingOut"
    )
    old = replace(runs, created="t1")
    assert (
        by_type(service_state(old, ended=(LOST,), spec=GPU))["Progressing"].reason
        == "DeviceFailure"
    )
    other = replace(LOST, revision="00000")
    assert (
        by_type(service_state(waiting, ended=(other,), spec=GPU))["Progressing"].reason
        == "RollingOut"
    )


@pytest.mark.parametrize(
    ("code", "reason"), [(43, "DeviceFailure"), (44, "RankLost"), (45, "NoProgress")]
)
def test_a_lost_device_or_rank_is_named_until_the_pod_is_validated_again(
    code: int, reason: str
) -> None:
    lost = replace(PLAIN, ended=ended(code, message="GPU 1 (rank 1 of 2) does not answer"))
    _, events = status.build(service_state(lost), {}, "now")
    got = by_type(service_state(lost))["Progressing"]
    assert (got.status, got.reason) == ("False", reason)
    assert "GPU 1 (rank 1 of 2)" in got.message and reason in {e.reason for e in events}
    again = ready_pod(ended=ended(code))
    assert by_type(service_state(again))["Progressing"].reason == "Complete"


def test_a_kill_by_the_kubelet_is_not_an_engine_s_own_end() -> None:
    for code in (0, 137, 143):
        state = service_state(replace(PLAIN, ended=ended(code)))
        got = by_type(state)["CapacityMeasured"]
        assert (got.status, got.reason) == ("False", "Killed")
        assert f"code {code}" in got.message
        assert "Killed" in {e.reason for e in status.build(state, {}, "now")[1]}
    again = replace(PLAIN, ended=ended(137), running=True, report=report(State.LOADING))
    assert by_type(service_state(again))["CapacityMeasured"].reason == "Loading"


def test_the_last_figures_stay_while_nothing_serves_marked_with_their_time() -> None:
    served = CapacityStatus.of([report(State.VALIDATED, 4096), report(State.VALIDATED, 4000)])
    kept = retained(None, served, "2026-11-22T10:00:00Z")
    assert kept is not None and kept.as_of is None
    assert retained(kept, CapacityStatus.of([report(State.VALIDATED, 4000)]), "later") == kept
    gone = retained(kept, None, "2026-11-22T11:00:00Z")
    assert gone is not None and gone.as_of == "2026-11-22T11:00:00Z"
    assert retained(gone, None, "2026-11-22T12:00:00Z") == gone, "written once"
    assert retained(gone, served, "2026-11-22T12:00:00Z") == kept
    made, _ = status.build(
        service_state(PLAIN, stable_state=RevisionState(accepted=1, capacity=gone)), {}, "now"
    )
    assert made["capacity"]["kvTokens"] == 4000 and made["capacity"]["serving"] is False
    assert (made["capacity"]["kvTokensTotal"], made["capacity"]["asOf"]) == (0, gone.as_of)
    made, _ = status.build(
        service_state(ready_pod(), stable_state=RevisionState(capacity=gone)), {}, "now"
    )
    assert made["capacity"]["kvTokensTotal"] == 4096 and made["capacity"]["serving"] is True
    assert "asOf" not in made["capacity"]
    for text in ("", "{}", gone.dumps().replace("2026-11-22T11:00:00Z", "yesterday")):
        assert CapacityStatus.parse(text) is None


def test_warnings_of_reports_reach_the_status_with_one_event() -> None:
    slow = replace(report(State.VALIDATED), warnings=("slower kernels", "no host memory limit"))
    pods = (replace(ready_pod(), report=slow), replace(ready_pod(), name="b", report=slow))
    made, news = status.build(service_state(*pods), {}, "now")
    assert made["warnings"] == ["no host memory limit", "slower kernels"]
    assert [n.message for n in news if n.reason == "ReplicaWarning"] == made["warnings"]
    _, quiet = status.build(service_state(*pods), made, "later")
    assert not [n for n in quiet if n.reason == "ReplicaWarning"]
    assert "warnings" not in status.build(service_state(ready_pod()), made, "later")[0]


def test_a_spec_that_costs_more_than_it_seems_is_warned_of_once() -> None:
    hub = {"source": "hf://org/name@" + "0" * 40}
    secret = {"apiKeySecret": {"name": "s", "key": "k"}}
    costly = {"model": hub, "rollout": {"strategy": "Recreate"}, "access": secret}
    kept = {
        **costly,
        "model": {**hub, "cache": {"claim": "c"}},
        "access": {**secret, "tlsSecret": {"name": "t"}},
    }
    state = service_state(ready_pod(), spec=costly)
    made, news = status.build(state, {}, "now")
    assert [text.partition(" without ")[0] for text in made["warnings"]] == [
        "spec.access.apiKeySecret",
        "spec.rollout.strategy Recreate",
    ]
    assert [n.message for n in news if n.reason == "SpecWarning"] == made["warnings"]
    _, quiet = status.build(state, made, "later")
    assert not [n for n in quiet if n.reason == "SpecWarning"]
    state = service_state(ready_pod(), spec=kept)
    assert "warnings" not in status.build(state, made, "later")[0]


def test_what_would_help_is_a_field_and_outlives_the_rejected_pod() -> None:
    knobs = (Knob("spec.engine.maxModelLen", Direction.LOWER, 512),)
    termination = Termination(
        1, 41, "ContextDoesNotFit", "512 fit", None, Binding.CONTEXT, 512, knobs
    )
    crashed = replace(PLAIN, ended=Ended(41, "Error", termination, "512 fit"), restarts=1)
    expected = {
        "revision": "aaaaa",
        "code": 41,
        "name": "ContextDoesNotFit",
        "message": "512 fit",
        "binding": "Context",
        "largestMaxModelLen": 512,
        "knobs": [{"field": "spec.engine.maxModelLen", "direction": "lower", "value": 512}],
    }
    assert status.build(service_state(crashed), {}, "now")[0]["diagnosis"] == expected
    assert "diagnosis" not in status.build(service_state(ready_pod()), {}, "now")[0]
    stored = revision_state.to_annotations(
        RevisionState(verdict="Rejected", stable_at_verdict=3, diagnosis=termination)
    )
    kept = revision_state.read({"metadata": {"annotations": stored}}).last_verdict()
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=kept, rejected="bbbbb")
    made, _ = status.build(service_state(ready_pod(), plan=plan), {}, "now")
    assert made["diagnosis"] == {**expected, "revision": "bbbbb"}


def test_a_gate_s_verdict_has_one_event_with_its_figures() -> None:
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=FAILED, rejected="bbbbb")
    made, news = status.build(service_state(ready_pod(), plan=plan), {}, "now")
    assert [n.reason for n in news if "Gate" in n.reason or "Rejected" in n.reason] == [
        "RevisionRejected"
    ]
    assert made["rollout"]["gate"] == {
        "revision": "bbbbb",
        "result": "Rejected",
        "measured": 9,
        "required": 950,
        "baseline": 1000,
        "message": FAILED.message,
        "time": "now",
    }
    again, silent = status.build(service_state(ready_pod(), plan=plan), made, "later")
    assert again == made and not silent
    taken_back, quiet = status.build(
        service_state(
            ready_pod(), stable_state=RevisionState(accepted=2, verdict="Passed", message="enough")
        ),
        made,
        "later",
    )
    assert taken_back["rollout"]["gate"]["result"] == "Passed"
    assert not [n for n in quiet if n.reason == "GatePassed"], "its event was sent when it passed"


def test_each_rejected_revision_has_one_event() -> None:
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=FAILED, rejected="bbbbb")
    made, _ = status.build(service_state(ready_pod(), plan=plan), {}, "now")
    another = replace(plan, rejected="ccccc")
    _, news = status.build(service_state(ready_pod(), plan=another), made, "later")
    assert [n.message for n in news if n.reason == "RevisionRejected"] == [
        f"revision ccccc was rejected, aaaaa serves: {FAILED.message}"
    ]
    late = replace(plan, gate=replace(STUCK, expired=True))
    _, news = status.build(service_state(ready_pod(), plan=late), {}, "now")
    assert [n.reason for n in news if "Rejected" in n.reason] == ["RevisionRejected"]
    kept = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", FAILED)  # onFailure: Hold
    made, news = status.build(service_state(ready_pod(), plan=kept), {}, "now")
    assert [n.reason for n in news if "Rejected" in n.reason] == ["RevisionRejected"]
    assert not status.build(service_state(ready_pod(), plan=kept), made, "later")[1]


def test_the_deadline_and_quota_show() -> None:
    assert (
        by_type(service_state(PLAIN, deadline_exceeded=True))["Progressing"].reason
        == "DeadlineExceeded"
    )
    quota = Condition("Progressing", "False", "QuotaExceeded", "pods: 5 of 5")
    assert by_type(service_state(PLAIN, apply_error=quota))["Progressing"] == quota


def test_a_download_is_the_reason_and_not_that_its_time_is_over() -> None:
    """A download of a hundred gigabytes takes longer than a Deployment's progress deadline."""
    pod = replace(PLAIN, downloading=True)
    got = by_type(service_state(pod, deadline_exceeded=True))
    assert got["Progressing"].reason == "RollingOut"
    assert got["Ready"].reason == "Downloading"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "chat-1" is forbidden: no PriorityClass with name urgent', "PodsRefused"),
        ('pods "chat-1" is forbidden: exceeded quota: small', "QuotaExceeded"),
    ],
)
def test_pods_that_are_never_created_are_reported_with_the_api_servers_message(
    message: str, reason: str
) -> None:
    condition = by_type(service_state(refused=message))["Progressing"]
    assert (condition.status, condition.reason, condition.message) == ("False", reason, message)


def test_what_pods_wait_for_is_reported() -> None:
    waits = Preparation({}, condition="ModelAvailable", reason="Downloading", message="Job x")
    got = by_type(service_state(preparing=waits))
    assert got["ModelAvailable"] == Condition("ModelAvailable", "False", "Downloading", "Job x")
    assert got["Ready"].reason == "Downloading"
    pull = Preparation({}, condition="Progressing", reason="ImagePullFailed", message="Job x")
    assert by_type(service_state(preparing=pull))["Progressing"].reason == "ImagePullFailed"


@pytest.mark.parametrize(("rejected", "back"), [(True, False), (True, True), (False, False)])
def test_no_event_claims_that_a_revision_serves_which_does_not(rejected: bool, back: bool) -> None:
    """With Recreate the stable revision is gone; the candidate is held, or was rejected and the
    stable one is coming back."""
    candidate, gone = ("", "bbbbb") if rejected else ("bbbbb", "")
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", candidate, FAILED, gone)
    pods = (ready_pod(),) if back else ()
    message = by_type(service_state(*pods, plan=plan))["UpToDate"].message
    assert ("aaaaa serves" in message) == back
    assert ("nothing serves" in message) == (not back)


def test_a_size_away_from_its_record_is_reported() -> None:
    kept = recorded()
    assert by_type(service_state(ready_pod()))["CapacityStable"].reason == "NoRecord"
    starting = by_type(service_state(PLAIN, records=recorded()))["CapacityStable"]
    assert (starting.status, starting.reason) == ("Unknown", "Unknown")
    assert starting.message == "no replica is measured yet; sizes are recorded: 1"
    assert (
        by_type(service_state(ready_pod(4000), records=kept))["CapacityStable"].reason == "Stable"
    )
    other = by_type(service_state(ready_pod(), ready_pod(3900, "chat-aaaaa-2"), records=kept))
    assert other["CapacityStable"].reason == "Drifted"
    assert "chat-aaaaa-2 measured 3900" in other["CapacityStable"].message
    assert other["Ready"].status == "True"


def test_capacity_is_that_of_the_smallest_replica() -> None:
    made = service_state(ready_pod(4096), ready_pod(4000, name="b"), spec={"replicas": 2})
    out, _ = status.build(made, {}, "now")
    assert out["capacity"]["kvTokens"] == 4000
    assert out["capacity"]["kvTokensTotal"] == 8096
    assert out["capacity"]["spread"] == {"min": 4000, "max": 4096}
    assert out["capacity"]["fullLengthSequences"] == 3
    assert [r["kvTokens"] for r in out["replicaSizing"]] == [4000, 4096]


def test_an_unready_replica_gives_no_capacity() -> None:
    out, _ = status.build(service_state(replace(ready_pod(), ready=False)), {}, "now")
    assert "capacity" not in out
    assert out["replicaSizing"][0]["state"] == "GateClosed"


def test_at_most_sixteen_replicas_are_listed_worst_first() -> None:
    pods = [ready_pod(5000 + i, name=f"p{i}") for i in range(20)]
    out, _ = status.build(service_state(*pods, replace(PLAIN, name="bad")), {}, "now")
    assert len(out["replicaSizing"]) == 16
    assert out["replicaSizing"][0]["pod"] == "bad"


def test_one_event_a_transition_with_its_figures() -> None:
    made = service_state(ready_pod())
    first, news = status.build(made, {}, "t1")
    assert {e.reason for e in news} == {"CapacityValidated", "Serving"}
    assert "4096" in news[0].message
    again, none = status.build(made, first, "t2")
    assert none == []
    assert again == first  # transition times stay, so nothing is written


def test_a_forged_status_is_rewritten() -> None:
    """C24: neither figures nor conditions of a forged status are kept."""
    forged = {
        "capacity": {"kvTokens": 10**9},
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "Evil"}],
    }
    out, _ = status.build(service_state(PLAIN), forged, "now")
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
        "Reconciling",
    }


def test_a_refused_spec_leaves_a_serving_one_ready() -> None:
    serving, _ = status.build(service_state(ready_pod()), {}, "t1")
    wrong = Condition("Accepted", "False", "SpecInvalid", "spec.model.source …")
    body = {"metadata": {"generation": 4}, "status": serving}
    out, news = status.refused(wrong, body, "t2")
    found = {c["type"]: c["status"] for c in out["conditions"]}
    assert (found["Accepted"], found["Ready"]) == ("False", "True")
    assert (serving["reason"], out["reason"]) == ("Serving", "SpecInvalid")
    assert out["capacity"] == serving["capacity"]
    assert [e.reason for e in news] == ["SpecInvalid"]


@pytest.mark.parametrize(
    ("result", "status"), [(GateResult.PASSED, "True"), (GateResult.HELD, "False")]
)
def test_the_last_of_the_old_ones_is_gone_and_the_new_ones_serve(
    result: GateResult, status: str
) -> None:
    """Near the end of Replace and Recreate the old revision has no replica left."""
    plan = RolloutPlan({"bbbbb": 2, "aaaaa": 0}, "aaaaa", "bbbbb", Verdict(result, "why"))
    new = replace(ready_pod(), name="b", revision="bbbbb")
    assert by_type(service_state(new, plan=plan))["Ready"].status == status


def test_replicas_that_cannot_be_read_serve_on_where_their_revision_was_accepted() -> None:
    unread = replace(
        PLAIN, ready=True, running=True, report_error="ConnectionRefusedError at x:8001"
    )
    accepted = RevisionState(accepted=1)
    conditions = by_type(service_state(unread, stable_state=accepted))
    assert (conditions["Ready"].status, conditions["Ready"].reason) == ("True", "Serving")
    assert "cannot be read" in conditions["Ready"].message
    assert conditions["CapacityMeasured"].reason == "ReportMissing"
    assert by_type(service_state(unread))["Ready"].status == "False"  # nothing was ever validated


def test_a_pod_that_kubernetes_ended_is_an_event_of_a_healthy_service() -> None:
    evicted = EndedPod("chat-aaaaa-9", "u9", "aaaaa", "n1", "t3", "Evicted", "its disk is full")
    made, news = status.build(
        service_state(ready_pod(), ended=(evicted, LOST)), {"endedPods": 1}, "now"
    )
    (one,) = [event for event in news if event.reason == "PodEnded"]
    assert one.kind == "Warning" and "chat-aaaaa-9 on n1: Evicted: its disk is full" in one.message
    _, again = status.build(service_state(ready_pod(), ended=(evicted, LOST)), made, "now")
    assert "PodEnded" not in [event.reason for event in again]


def rendered(made: ServiceState) -> dict[str, Any]:
    return status.build(made, {}, "2026-01-01T00:00:00Z")[0]


def test_the_address_is_that_of_the_revision_that_serves() -> None:
    """A spec that asks for TLS and another name was rejected: plain HTTP and the old name serve."""
    spec = {
        "model": {"source": "pvc://models/tiny", "servedName": "new"},
        "access": {"tlsSecret": {"name": "cert"}},
    }
    data = {"inputs": {"model": {}}, "servedName": "old"}
    verdict = Verdict(GateResult.REJECTED, "too little", 1)
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", "", verdict, rejected="bbbbb")
    got = rendered(service_state(ready_pod(), spec=spec, plan=plan, stable_data=data))
    assert (got["url"], got["model"]) == ("http://chat.ns.svc:8000/v1", "old")
    got = rendered(service_state(ready_pod(), spec=spec))
    assert (got["url"], got["model"]) == ("https://chat.ns.svc:8000/v1", "new")


def test_a_ready_replica_whose_report_cannot_be_read_serves() -> None:
    figures = CapacityStatus.of([ready_pod().report])
    known = RevisionState(accepted=1, capacity=figures)
    silent = replace(ready_pod(), report=None, report_error="TimeoutError")
    got = rendered(service_state(silent, stable_state=known))["capacity"]
    assert got["serving"] and "asOf" not in got and got["kvTokens"] == 4096
    got = rendered(service_state(PLAIN, stable_state=known))["capacity"]
    assert not got["serving"]


def test_a_person_is_asked_for_where_nothing_can_be_compared() -> None:
    verdict = Verdict(GateResult.HELD, "another model", 4096, blocked=True)
    candidate = replace(ready_pod(), revision="bbbbb", name="b", ready=False)
    plan = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", verdict)
    got = rendered(service_state(ready_pod(), candidate, plan=plan))["conditions"]
    assert [c["reason"] for c in got if c["type"] == "Stalled"] == ["NotComparable"]
    assert not [c for c in got if c["type"] == "Reconciling"]
