"""The status that is written, with its figures and events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from services import (
    BODY,
    FAILED,
    GPU,
    HELD,
    LOST,
    PASSED,
    PLAIN,
    STUCK,
    by_type,
    ended,
    ready_pod,
    recorded,
    report,
    service_state,
)

from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    Binding,
    Direction,
    Knob,
    State,
    Termination,
)
from kvline_operator.api.spec import parse
from kvline_operator.observe.ended_pods import EndedPod
from kvline_operator.observe.pods import Ended
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.report import status
from kvline_operator.report.service_state import Condition, ServiceState
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus, retained
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict


def test_an_accepted_revision_that_measures_less_serves_and_warns_with_both_figures() -> None:
    """A smaller GPU or another driver must not keep an accepted revision from serving: both figures
    are reported, and only minKVTokens is a threshold."""
    stable_state = RevisionState(accepted=2, baseline={"": 4096}, bytes_per_token=512)
    made = service_state(ready_pod(2000), stable_state=stable_state, records={})
    got = by_type(made)
    assert got["Ready"].reason == "Serving"
    assert (got["CapacitySufficient"].status, got["CapacityStable"].status) == ("True", "False")
    stable = got["CapacityStable"]
    assert stable.reason == "BelowBaseline"
    assert "measured 2000 KV tokens, 3892 are expected (95 % of the baseline 4096" in stable.message
    assert "1892 short" in stable.message and "promote: aaaaa" in stable.message
    assert "1000 are required (spec.capacity.minKVTokens)" in got["CapacitySufficient"].message
    _, news = status.build(made, {}, "now")
    assert [n.message for n in news if n.reason == "BelowBaseline"] == [stable.message]
    lenient = service_state(
        ready_pod(2000), stable_state=stable_state, spec={"rollout": {"minCapacityPercent": 40}}
    )
    assert by_type(lenient)["CapacityStable"].reason == "NoRecord", "the policy of today counts"


def test_a_loss_with_less_memory_than_the_baseline_s_names_the_memory() -> None:
    """Nothing has changed on its node then. Where nothing is recorded of the baseline, or with as
    much memory, the node is where to search."""
    stable_state = RevisionState(accepted=2, baseline={"": 4096}, bytes_per_token=512)
    less, size = ready_pod(2000), report(State.VALIDATED, 2000).result
    assert size is not None
    memory = MemoryV1(90, 20, 10, 0, 40, 10, 10).upgraded()
    smaller = replace(size, ranks=(memory,), fingerprint="e" * 32)
    assert less.report is not None
    changed = replace(less, report=replace(less.report, result=smaller))
    for pod, words in ((changed, "90 MiB of memory, the baseline 100"), (less, "on its node")):
        made = service_state(pod, stable_state=stable_state, records=recorded())
        message = by_type(made)["CapacityStable"].message
        assert words in message and ("on its node" in message) == (pod is less)
    unknown = service_state(changed, stable_state=stable_state, records={})
    assert "on its node" in by_type(unknown)["CapacityStable"].message


UNASKED = replace(STUCK, promotion_refused="since it never ran")
MEASURING = replace(HELD, promotion_refused="since it never ran")


@pytest.mark.parametrize(
    ("gate", "rejected", "paused", "reason", "text"),
    [
        (HELD, False, False, "RollingOut", "is measured before it takes traffic: b: Probing"),
        (STUCK, False, False, "GateHeld", "b has no node"),
        (PASSED, False, False, "RollingOut", "is rolled out: 0 of 1 replicas are ready"),
        (PASSED, False, True, "Paused", "spec.rollout.paused is true"),
        (FAILED, False, False, "RevisionRejected", "is kept out of traffic, aaaaa serves"),
        (
            FAILED,
            True,
            False,
            "RevisionRejected",
            "was rejected, aaaaa serves: measured 9 KV tokens",
        ),
        (UNASKED, True, False, "PromotionRefused", "is not promoted, since it never ran: b has no"),
        (UNASKED, False, False, "PromotionRefused", "is not promoted"),
        (MEASURING, False, False, "RollingOut", "is measured before it takes traffic"),
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


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("1300Mi", "a memory limit of 1300Mi, its revision 1Gi: changed at admission"),
        ("", "no memory limit, its revision 1Gi: changed at admission"),
        ("1024Mi", ""),  # the same
    ],
)
def test_a_pod_with_another_memory_limit_than_its_revision_is_warned_of(
    limit: str, words: str
) -> None:
    state = service_state(ready_pod(memory=limit), memory_limits={"aaaaa": "1Gi"})
    made, news = status.build(state, {}, "now")
    found = made.get("warnings", [])
    assert len(found) == bool(words)
    assert all(text.startswith(f"pod chat-aaaaa-1 has {words}") for text in found)
    assert [n.message for n in news if n.reason == "ReplicaWarning"] == found
    unknown = service_state(ready_pod(memory=limit), memory_limits={})
    assert "warnings" not in status.build(unknown, {}, "now")[0]


def test_a_spec_that_costs_more_than_it_seems_is_warned_of_once() -> None:
    hub = {"source": "hf://org/name@" + "0" * 40}
    secret = {"apiKeySecretRef": {"name": "s", "key": "k"}}
    costly = {"model": hub, "rollout": {"strategy": "Recreate"}, "access": secret}
    kept = {
        **costly,
        "model": {**hub, "cache": {"claimName": "c"}},
        "access": {**secret, "tlsSecretRef": {"name": "t"}},
    }
    state = service_state(ready_pod(), spec=costly)
    made, news = status.build(state, {}, "now")
    assert [text.partition(" without ")[0] for text in made["warnings"]] == [
        "spec.access.apiKeySecretRef",
        "spec.rollout.strategy Recreate",
    ]
    assert [n.message for n in news if n.reason == "SpecWarning"] == made["warnings"]
    _, quiet = status.build(state, made, "later")
    assert not [n for n in quiet if n.reason == "SpecWarning"]
    state = service_state(ready_pod(), spec=kept)
    assert "warnings" not in status.build(state, made, "later")[0]


def test_an_annotation_that_asked_an_earlier_operator_is_warned_of_with_its_field() -> None:
    """It has no effect any more: a service whose rollout was paused by one goes on."""
    fields = {
        "kvline.dev/paused": "spec.rollout.paused",
        "kvline.dev/promote": "spec.rollout.promote",
        "kvline.dev/restart": "spec.restartedAt",
        "kvline.dev/upgrade": "spec.upgradePolicy",
    }
    annotations = {**dict.fromkeys(fields, "true"), "example.com/paused": "true"}
    asked = {**BODY, "metadata": {**BODY["metadata"], "annotations": annotations}}
    state = replace(service_state(ready_pod()), spec=parse(asked))
    made, news = status.build(state, {}, "now")
    for text, (name, field) in zip(made["warnings"], fields.items(), strict=True):
        assert f"annotation {name} has no effect" in text and f"use {field}" in text
    assert [n.message for n in news if n.reason == "SpecWarning"] == made["warnings"]
    assert "warnings" not in status.build(service_state(ready_pod()), made, "later")[0]


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
        RevisionState(verdict=StoredVerdict(GateResult.REJECTED, 3, diagnosis=termination))
    )
    kept = revision_state.read({"metadata": {"annotations": stored}}).verdict
    assert kept is not None
    plan = RolloutPlan({"aaaaa": 1}, "aaaaa", gate=kept.verdict(), rejected="bbbbb")
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
            ready_pod(), stable_state=RevisionState(accepted=2, verdict=StoredVerdict.of(PASSED, 1))
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


def test_capacity_is_that_of_the_smallest_replica() -> None:
    made = service_state(ready_pod(4096), ready_pod(4000, name="b"), spec={"replicas": 2})
    out, _ = status.build(made, {}, "now")
    assert out["capacity"]["kvTokens"] == 4000
    assert out["capacity"]["kvTokensTotal"] == 8096
    assert out["capacity"]["spread"] == {"min": 4000, "max": 4096}
    assert out["capacity"]["fullLengthSequences"] == 3
    assert [r["kvTokens"] for r in out["replicaSizing"]] == [4000, 4096]


def test_what_would_help_is_there_before_it_is_asked() -> None:
    """Of the stable revision, also once none of its replicas serves any more."""
    out, _ = status.build(service_state(ready_pod()), {}, "now")
    assert out["capacity"]["tokensPerGiB"] == (1 << 30) // 512
    memory, half = out["capacity"]["estimates"]
    assert (memory["field"], memory["value"]) == ("spec.resources.memory", "3Gi")
    assert memory["bound"] == "AtLeast" and memory["kvTokens"] > 4096
    assert (half["field"], half["value"]) == ("spec.engine.maxRunningRequests", "2")
    assert half["bound"] == "AtMost" and half["kvTokens"] > 4096
    kept = retained(None, CapacityStatus.of([report(State.VALIDATED)]), "then")
    gone = service_state(PLAIN, stable_state=RevisionState(accepted=1, capacity=kept))
    assert status.build(gone, {}, "now")[0]["capacity"]["estimates"] == [memory]
    on_gpu = service_state(ready_pod(), spec=GPU)
    assert [r["field"] for r in status.build(on_gpu, {}, "now")[0]["capacity"]["estimates"]] == [
        half["field"]
    ]


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
        "access": {"tlsSecretRef": {"name": "cert"}},
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
