"""Conditions for every state that a service can be in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from services import (
    FAILED,
    GPU,
    HELD,
    LOST,
    PLAIN,
    STUCK,
    by_type,
    ended,
    ready_pod,
    recorded,
    report,
    service_state,
)

from kvline_contract.exits import ExitCode
from kvline_contract.report import (
    Current,
    Stage,
    State,
)
from kvline_operator.observe import trouble
from kvline_operator.observe.pods import Ended, PodView
from kvline_operator.observe.trouble import Effect, Trouble
from kvline_operator.plan.prepare import Preparation
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report import status
from kvline_operator.report.service_state import Condition
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult, Phase, Verdict


def test_a_serving_replica() -> None:
    got = by_type(service_state(ready_pod(), records=recorded()))
    assert {k: c.status for k, c in got.items()} == dict.fromkeys(got, "True")
    assert got["Ready"].reason == "Serving"
    assert got["UpToDate"].reason == "UpToDate"


def test_up_to_date_is_the_newest_revision_alone() -> None:
    left = replace(ready_pod(), name="old", revision="00000")
    got = by_type(service_state(ready_pod(), left))
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("False", "RollingOut")
    assert "still to be removed: 1 replica of others" in got["UpToDate"].message


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
    assert status.replica_state(small, Thresholds(1000)) == "BelowMinimum"


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
    again = replace(crashed, running=True, fresh=True, report=report(State.LOADING))
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
    effects = [trouble.of(pod) for pod in (waits, replace(waits, awaits=""))]
    assert [t and t.effect for t in effects] == [Effect.WAITS, Effect.HOLDS]


def test_a_kill_for_host_memory_beside_a_gpu_is_no_smaller_retry() -> None:
    killed = replace(PLAIN, ended=Ended(137, "OOMKilled", None, ""), oom_kills=1, on_gpu=True)
    found = by_type(service_state(killed, spec=GPU))["CapacityMeasured"]
    assert found.reason == "OutOfMemory"
    assert "host memory, kill 1" in found.message
    assert "raise spec.resources.memory" in found.message


@pytest.mark.parametrize("minimum", [9500, 0])
def test_host_memory_is_no_advice_for_a_gpu_that_measured_too_little(minimum: int) -> None:
    """It holds no KV cache of a GPU."""
    limits = Thresholds(minimum, 95, {"": 9000})
    for on_gpu in (True, False):
        pod = replace(ready_pod(), on_gpu=on_gpu)
        found = by_type(service_state(pod, limits=limits))["CapacitySufficient"]
        assert found.reason == ("BelowMinimum" if minimum > 8550 else "BelowBaseline")
        assert ("spec.resources.memory" in found.message) != on_gpu
        assert "lower spec.engine.maxPrefillTokens or maxRunningRequests" in found.message


@pytest.mark.parametrize(
    ("pod", "kind", "reason"),
    [
        (replace(PLAIN, unschedulable="0/1 nodes"), "Progressing", "Unschedulable"),
        (replace(PLAIN, waiting_reason="ImagePullBackOff"), "Progressing", "ImagePullFailed"),
        (
            replace(
                PLAIN,
                waiting_reason="CreateContainerConfigError",
                waiting_message='secret "hf" not found',
            ),
            "ModelAvailable",
            "SecretMissing",
        ),
        (replace(PLAIN, downloading=True), "ModelAvailable", "Downloading"),
        (replace(PLAIN, download_ended=ended(33)), "ModelAvailable", "DownloadFailed"),
        (replace(PLAIN, running=True), "CapacityMeasured", "Pending"),
        (replace(PLAIN, running=True, report_error="x"), "CapacityMeasured", "ReportMissing"),
        (
            replace(PLAIN, running=True, report_error="x", fresh=True),
            "CapacityMeasured",
            "Pending",
        ),
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


def test_the_deadline_and_quota_show() -> None:
    late = service_state(
        PLAIN, spec={"rollout": {"progressDeadlineSeconds": 60}}, deadline_exceeded=True
    )
    found = by_type(late)["Progressing"]
    assert found.reason == "DeadlineExceeded"
    assert found.message == "no progress within spec.rollout.progressDeadlineSeconds (60)"
    quota = Condition("Progressing", "False", "QuotaExceeded", "pods: 5 of 5")
    assert by_type(service_state(PLAIN, apply_error=quota))["Progressing"] == quota


def test_the_model_of_an_accepted_revision_was_seen() -> None:
    """Also while nothing of it runs: a quota refuses the pod that takes another's place."""
    found = by_type(service_state(refused="pods: 5 of 5"))["ModelAvailable"]
    assert (found.status, found.reason) == ("True", "Available")
    assert "an earlier replica" in found.message
    first = service_state(phases={"aaaaa": Phase.NEW})
    assert by_type(first)["ModelAvailable"].reason == "Pending"


def test_a_candidate_whose_objects_a_quota_refuses_is_held() -> None:
    """As where it refuses their pods: RollingOut would stand there for ever."""
    plan = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", HELD)
    text = "POST Deployment ns/chat-bbbbb: HTTP 403: deployments: 5 of 5"
    quota = Condition("Progressing", "False", "QuotaExceeded", text)
    got = by_type(service_state(PLAIN, plan=plan, apply_error=quota))["UpToDate"]
    assert got.reason == "GateHeld" and quota.message in got.message
    passing = Condition("Progressing", "False", "WebhookUnavailable", text)
    other = replace(quota, message="POST Service ns/chat: HTTP 403: services: 5 of 5")
    assert (
        by_type(service_state(PLAIN, plan=plan, apply_error=other))["UpToDate"].reason
        == "RollingOut"
    )
    assert (
        by_type(service_state(PLAIN, plan=plan, apply_error=passing))["UpToDate"].reason
        == "RollingOut"
    )


def test_a_download_is_the_reason_and_not_that_its_time_is_over() -> None:
    """A download of a hundred gigabytes takes longer than a Deployment's progress deadline."""
    pod = replace(PLAIN, downloading=True)
    got = by_type(service_state(pod, deadline_exceeded=True))
    assert got["Progressing"].reason == "RollingOut"
    assert got["Ready"].reason == "Downloading"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "chat-1" is forbidden: no PriorityClass with name urgent', "AdmissionDenied"),
        ('pods "chat-1" is forbidden: exceeded quota: small', "QuotaExceeded"),
        ('pods "chat-1" is forbidden: failed quota: q: must specify cpu', "QuotaExceeded"),
        ('pods "quota-1" is forbidden: maximum cpu usage per Pod is 1', "LimitRangeViolated"),
        (
            'pods "chat-1" is forbidden: violates PodSecurity "restricted:latest"',
            "PodSecurityViolated",
        ),
        ("timed out waiting for the condition", "PodsRefused"),
    ],
)
def test_pods_that_are_never_created_are_reported_with_the_api_servers_message(
    message: str, reason: str
) -> None:
    condition = by_type(service_state(refused=message))["Progressing"]
    assert (condition.status, condition.reason, condition.message) == ("False", reason, message)


def test_what_pods_wait_for_is_reported() -> None:
    loads = Trouble("ModelAvailable", "Downloading", "Job x", "Job x", Effect.WAITS)
    waits = Preparation({}, trouble=loads)
    got = by_type(service_state(preparing=waits))
    assert got["ModelAvailable"] == Condition("ModelAvailable", "False", "Downloading", "Job x")
    assert got["Ready"].reason == "Downloading"
    pull = Preparation({}, trouble=Trouble("Progressing", "ImagePullFailed", "Job x", "Job x"))
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
