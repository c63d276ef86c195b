"""What keeps a pod from serving is decided once: gate, conditions and explain say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from services import GPU, HELD, LOST, by_type, ready_pod, report, service_state

from kvline_contract.exits import ExitCode, meaning
from kvline_contract.report import Stage, State
from kvline_kubectl.show import explain
from kvline_operator.observe import trouble
from kvline_operator.observe.pods import PodView, view
from kvline_operator.observe.reports import Reading
from kvline_operator.observe.trouble import Effect
from kvline_operator.plan.candidate import counted
from kvline_operator.plan.candidate import view as candidate
from kvline_operator.plan.gate import Baseline, ComparisonGroup, evaluate
from kvline_operator.plan.prepare import Preparation
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report import status
from kvline_operator.report.advice import advise
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import Verdict

Object = dict[str, Any]
NOW, EARLIER, JUST_NOW = "2026-01-01T12:00:00Z", "2026-01-01T11:00:00Z", "2026-01-01T11:59:30Z"
GROUP = ComparisonGroup("hf://org/model", 0)
SECRETS = [{"name": "access", "secret": {"secretName": "keys", "optional": True}}]


def pod(
    state: Object | None = None,
    last: Object | None = None,
    download: Object | None = None,
    conditions: tuple[Object, ...] = (),
    reading: Reading | None = None,
    restarts: int = 0,
    **spec: Any,
) -> PodView:
    """A pod with this status, as the API server has it."""
    server = {"name": "server", "restartCount": restarts, "state": state or {}}
    server |= {"lastState": last} if last else {}
    made: Object = {"containerStatuses": [server], "conditions": list(conditions)}
    made |= {"initContainerStatuses": [{"name": "download", **download}]} if download else {}
    meta = {"name": "chat-1", "namespace": "ns", "uid": "u"}
    meta["labels"] = {"kvline.dev/revision": "aaaaa"}  # type: ignore[assignment]
    asked = {"limits": {"memory": "2Gi"}}
    loads = {"name": "download", "resources": {"limits": {"memory": "1Gi"}}}
    spec = {
        "initContainers": [loads],
        "containers": [{"name": "server", "resources": asked}],
        "nodeName": "n1",
        **spec,
    }
    return view({"metadata": meta, "spec": spec, "status": made}, reading or Reading(None), NOW)


def waiting(reason: str, message: str = "its words") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, reason: str = "Error", message: str = "its words") -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def running(since: str = EARLIER) -> Object:
    return {"running": {"startedAt": since}}


def no_node(reason: str, message: str) -> tuple[Object, ...]:
    return ({"type": "PodScheduled", "status": "False", "reason": reason, "message": message},)


def not_set_up(since: str) -> tuple[Object, ...]:
    state = {"type": "PodReadyToStartContainers", "status": "False"}
    return ({**state, "lastTransitionTime": since},)


GATED = no_node("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
KUEUE = [{"name": "kueue.x-k8s.io/admission"}]
NO_CLAIM = no_node("Unschedulable", '0/3 nodes: persistentvolumeclaim "models" not found.')
ON_A_SILENT_NODE = (
    {"type": "Ready", "status": "False"},
    {"type": "ContainersReady", "status": "True"},
)
UNBOUND = "pod has unbound immediate PersistentVolumeClaims"
OTHER_ARCHITECTURE = "a line of its log\n" * 99 + "exec /opt/kvline/bin/python: exec format error\n"
CREATING = waiting("ContainerCreating", "")


@pytest.mark.parametrize(
    ("seen", "condition", "reason", "words"),
    [
        (
            pod(conditions=GATED, schedulingGates=KUEUE, nodeName=""),
            "Progressing",
            "SchedulingGated",
            "kueue.x-k8s.io/admission",
        ),
        (
            pod(conditions=no_node("Unschedulable", "0/3 nodes: 3 Insufficient memory")),
            "Progressing",
            "Unschedulable",
            "3 Insufficient memory",
        ),
        (
            pod(conditions=NO_CLAIM),
            "ModelAvailable",
            "ClaimMissing",
            "claim models does not exist in namespace ns",
        ),
        (
            pod(
                conditions=no_node(
                    "Unschedulable", f"0/1 nodes are available: {UNBOUND}. not found"
                ),
                volumes=[{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}],
            ),
            "ModelAvailable",
            "ClaimPending",
            "claim models of namespace ns has no volume: `kubectl -n ns describe pvc models`",
        ),
        (
            pod(CREATING, conditions=not_set_up("2026-01-01T11:57:00Z")),
            "Progressing",
            "PodNotSetUp",
            "kubectl -n ns describe pod chat-1",
        ),
        (
            pod(running(), conditions=ON_A_SILENT_NODE),
            "Progressing",
            "NodeNotReady",
            "node n1 does not report",
        ),
        (pod(waiting("ImagePullBackOff")), "Progressing", "ImagePullFailed", "its words"),
        (pod(waiting("ImageInspectError")), "Progressing", "ImagePullFailed", "its words"),
        (
            pod(waiting("CreateContainerConfigError", 'secret "hub" not found')),
            "ModelAvailable",
            "SecretMissing",
            'secret "hub" not found (namespace ns)',
        ),
        (
            pod(waiting("CreateContainerConfigError", "couldn't find key k in Secret ns/hub")),
            "ModelAvailable",
            "SecretMissing",
            "couldn't find key k in Secret ns/hub",
        ),
        (
            pod(waiting("CreateContainerConfigError", 'configmap "my-secret-map" not found')),
            "Progressing",
            "ContainerNotStarted",
            'configmap "my-secret-map" not found',
        ),
        (
            pod(waiting("CreateContainerConfigError", "image will run as root")),
            "Progressing",
            "ContainerNotStarted",
            "image will run as root",
        ),
        (pod(waiting("CreateContainerError")), "Progressing", "ContainerNotStarted", "on n1"),
        (
            pod(waiting("RunContainerError"), terminated(128, "StartError")),
            "Progressing",
            "ContainerNotStarted",
            "RunContainerError: its words",
        ),
        (
            pod(waiting("CrashLoopBackOff"), terminated(128, "StartError", "no such file")),
            "Progressing",
            "ContainerNotStarted",
            "no such file",
        ),
        (
            pod(waiting("CrashLoopBackOff"), terminated(1, message=OTHER_ARCHITECTURE)),
            "Progressing",
            "ContainerNotStarted",
            "exec format error",
        ),
        (
            pod(waiting("CrashLoopBackOff"), terminated(255, "Unknown")),
            "CapacityMeasured",
            "Killed",
            "the kubelet or its node",
        ),
        (
            pod(waiting("CrashLoopBackOff"), terminated(22, message="no key"), volumes=SECRETS),
            "ModelAvailable",
            "SecretMissing",
            "Secret keys of namespace ns",
        ),
        (
            pod(waiting("PodInitializing"), download={"state": terminated(137, "OOMKilled")}),
            "ModelAvailable",
            "DownloadFailed",
            "the download was killed at its memory limit of 1Gi",
        ),
        (
            pod(waiting("PodInitializing"), download={"state": terminated(31, message="cut off")}),
            "ModelAvailable",
            "Invalid",
            "cut off",
        ),
        (
            pod(waiting("PodInitializing"), download={"state": terminated(128, "StartError")}),
            "Progressing",
            "ContainerNotStarted",
            "its words",
        ),
    ],
)
def test_what_keeps_a_pod_from_serving_holds_the_gate_and_is_named(
    seen: PodView, condition: str, reason: str, words: str
) -> None:
    """F69, F78: the condition names the gate, the claim or what kubelet or runtime wrote, and the
    gate waits for the same. Of these some were reported by no condition, and most by a condition or
    the gate alone."""
    found = by_type(service_state(seen))
    assert (found[condition].status, found[condition].reason) == ("False", reason)
    assert words in found[condition].message
    assert found["Ready"].reason == reason and words in found["Ready"].message
    verdict = gate(seen)
    assert verdict.blocked and words in verdict.message and "chat-1" in verdict.message
    assert words in explained(seen)


@pytest.mark.parametrize(
    "seen",
    [
        pod(CREATING, conditions=not_set_up(JUST_NOW)),
        pod(running(), terminated(137)),
        pod(running(), terminated(128, "StartError")),
        pod(running(JUST_NOW), reading=Reading(None, "ConnectionRefusedError at 10.0.0.1:8001")),
        pod(running(), download={"state": terminated(0, "Completed"), "lastState": terminated(33)}),
    ],
    ids=["a volume's first minutes", "killed", "started at last", "opens its port", "loaded"],
)
def test_what_passes_by_itself_or_is_past_is_no_trouble(seen: PodView) -> None:
    assert trouble.of(seen) is None


def test_a_container_that_restarts_brings_no_advice_about_the_network() -> None:
    """Its port is closed for the first seconds of each start."""
    closed = Reading(None, "ConnectionRefusedError at 10.0.0.1:8001")
    failed = terminated(40, message="40 MiB short")
    for since in (JUST_NOW, EARLIER):
        output = explained(pod(running(since), failed, reading=closed, restarts=1))
        assert "40 MiB short" in output and "NetworkPolic" not in output
    output = explained(pod(running(JUST_NOW), reading=closed))
    assert "has just started" in output and "NetworkPolic" not in output
    assert "NetworkPolic" in explained(pod(running(), reading=closed))


READS = Stage("load", 1, 1 << 20, total_bytes=2 << 20)


def at(state: State, *stages: Stage) -> Reading:
    return Reading(replace(report(state), stages=stages))


@pytest.mark.parametrize(
    ("code", "seen", "stands"),
    [
        (22, at(State.LOADING), False),  # the container has run for an hour
        (22, at(State.STRESSING), False),
        (30, at(State.LOADING), True),
        (30, at(State.LOADING, READS), False),
        (31, at(State.LOADING, READS), True),  # the damaged file may be the last one
        (31, at(State.PROBING), False),
        (20, at(State.VALIDATING), False),
        (40, at(State.STRESSING), True),  # until it is validated
        (40, at(State.VALIDATED), False),
        (43, at(State.STRESSING), True),
    ],
)
def test_a_reason_goes_when_its_cause_goes(code: int, seen: Reading, stands: bool) -> None:
    """F71: a reason goes with the first step that is only possible without its cause.
    SecretMissing stood for 15 minutes beside the Secret, with the pod sizing."""
    last = pod(running(), terminated(code), reading=seen, restarts=1)
    assert (trouble.of(last) is not None) == stands
    known = meaning(code)
    got = by_type(service_state(last))[known.condition]
    assert (got.reason == known.reason and got.status == "False") == stands


@pytest.mark.parametrize(
    ("code", "since", "reason"),
    [
        (30, EARLIER, "Downloading"),
        (22, EARLIER, "Downloading"),
        (30, JUST_NOW, "NotFound"),
        (33, EARLIER, "DownloadFailed"),  # a transfer may fail at any time
    ],
)
def test_a_download_that_goes_on_is_not_what_it_failed_for(
    code: int, since: str, reason: str
) -> None:
    again = {"state": running(since), "lastState": terminated(code)}
    found = by_type(service_state(pod(waiting("PodInitializing"), download=again)))
    assert found["ModelAvailable"].reason == reason


@pytest.mark.parametrize(
    ("seen", "status_", "reason"),
    [
        (pod(), "Unknown", "Pending"),
        (pod(running()), "Unknown", "Pending"),
        (pod(waiting("CrashLoopBackOff"), terminated(1)), "Unknown", "Pending"),
        (pod(waiting("CrashLoopBackOff"), terminated(137)), "Unknown", "Pending"),
        (pod(running(), reading=at(State.LOADING)), "Unknown", "Loading"),
        (pod(running(), reading=at(State.PROBING)), "True", "Available"),
        (pod(waiting("CrashLoopBackOff"), terminated(41)), "True", "Available"),
    ],
)
def test_a_model_is_available_once_a_pod_has_seen_it(
    seen: PodView, status_: str, reason: str
) -> None:
    """Not because a container ran, or ended."""
    got = by_type(service_state(seen))
    assert (got["ModelAvailable"].status, got["ModelAvailable"].reason) == (status_, reason)
    if got["CapacityMeasured"].status == "False":
        assert got["Ready"].reason == got["CapacityMeasured"].reason


def test_a_candidate_s_model_is_not_what_the_stable_one_serves() -> None:
    plan = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", HELD)
    new = replace(pod(running(), reading=at(State.LOADING)), revision="bbbbb")
    got = by_type(service_state(ready_pod(), new, plan=plan))
    assert (got["CapacityMeasured"].status, got["Ready"].status) == ("True", "True")
    found = got["ModelAvailable"]
    assert (found.status, found.reason, found.message) == ("Unknown", "Loading", "loading")


def test_a_model_that_a_job_has_fetched_is_available() -> None:
    got = by_type(service_state(preparing=Preparation({}, done=True, has_read=True)))
    assert got["ModelAvailable"].status == "True"


FORBIDDEN = 'pods "chat-aaaaa-" is forbidden: exceeded quota: small, requested: pods=1'


def test_pods_that_are_refused_hold_the_gate_too() -> None:
    """The gate wrote «no replica has been measured yet» for as long as the quota was full."""
    refusal = trouble.of_refusals(FORBIDDEN, (), (), False)
    assert refusal is not None and refusal.reason == "QuotaExceeded"
    verdict = evaluate(candidate(GROUP, (), False, refusal), Baseline(GROUP, 0, {}), Thresholds())
    assert verdict.blocked and verdict.message == FORBIDDEN
    assert by_type(service_state(refused=FORBIDDEN))["Progressing"].reason == "QuotaExceeded"
    refusal = trouble.of_refusals("", (), (LOST,), True)
    assert (
        refusal is not None and "no healthy devices" in candidate(GROUP, (), False, refusal).blocker
    )
    assert by_type(service_state(ended=(LOST,), spec=GPU))["Progressing"].reason == "DeviceFailure"


def test_a_missing_model_brings_advice_about_the_model_alone() -> None:
    """The cause first, and none of the five conditions that wait for it."""
    hidden = "the hub has no org/name at 0000, or no right to read it"
    output = explained(pod(waiting("CrashLoopBackOff"), terminated(30, message=hidden), restarts=4))
    assert output.startswith(f"chat does not serve: NotFound. {hidden}")
    assert "spec.model.tokenSecretRef" in output
    for other in ("CapacityMeasured", "CapacitySufficient", "CapacityStable", "UpToDate"):
        assert other not in output


def test_two_causes_are_both_explained() -> None:
    """A node for one replica, memory for another."""
    killed = terminated(40, message="40 MiB short")
    both = (
        pod(conditions=no_node("Unschedulable", "0/3 nodes")),
        pod(waiting("CrashLoopBackOff"), killed, restarts=1),
    )
    output = explained(*both)
    assert output.index("Progressing: Unschedulable") < output.index(
        "CapacityMeasured: OutOfMemory"
    )


def gate(*pods: PodView) -> Verdict:
    return evaluate(candidate(GROUP, pods, False), Baseline(GROUP, 512, {"": 1}), Thresholds(1))


def explained(*pods: PodView) -> str:
    built, _ = status.build(service_state(*pods), {}, "now")
    console = Console(width=400)
    with console.capture() as printed:
        console.print(explain({"metadata": {"name": "chat"}, "status": built}, []))
    return printed.get()


REASONS = sorted(trouble.IMAGE_REASONS | trouble.START_REASONS)
ENDS = st.builds(
    terminated,
    st.sampled_from([*ExitCode, 126, 127, 128, 137, 143, 255]),
    st.sampled_from(["Error", "OOMKilled", "StartError", "Unknown", "ContainerStatusUnknown"]),
    st.sampled_from(["", "its words", "exec format error"]),
)
STATES = st.one_of(
    st.none(),
    st.sampled_from([running(), running(JUST_NOW), CREATING, waiting("CrashLoopBackOff")]),
    st.builds(waiting, st.sampled_from(REASONS), st.sampled_from(['secret "a" not found', ""])),
    ENDS,
)
READINGS = st.one_of(
    st.just(Reading(None)),
    st.builds(Reading, st.none(), st.just("TimeoutError"), st.booleans()),
    st.sampled_from([s for s in State if s is not State.FAILED]).map(at),
)


@st.composite
def pods(draw: st.DrawFn) -> PodView:
    """A pod with any status, some of which no kubelet writes."""
    readiness = {"type": "Ready", "status": draw(st.sampled_from(["True", "False"]))}
    more = draw(st.sampled_from([(), GATED, NO_CLAIM, not_set_up(EARLIER)]))
    init = {"state": draw(STATES) or {}, "lastState": draw(st.one_of(st.just({}), ENDS))}
    state = draw(STATES) or {}
    made = pod(
        state,
        draw(st.one_of(st.none(), ENDS)),
        draw(st.sampled_from([None, init])),
        (readiness, *more),
        draw(READINGS) if "running" in state else None,
        restarts=draw(st.integers(0, 7)),
    )
    ends = (draw(st.integers(0, 3)), draw(st.integers(0, 6)))
    return replace(made, failures=ends[0], oom_kills=ends[1])


@example(pod(running(), reading=Reading(None, "TimeoutError", invalid=True)))
@given(pods())
def test_gate_conditions_and_explain_agree_about_any_pod(seen: PodView) -> None:
    found = trouble.of(seen)
    verdict, conditions = gate(seen), by_type(service_state(seen))
    if seen.ready or found is None:
        assert found is None
        assert not verdict.blocked and verdict.result != "Rejected"
        return
    assert found.message and found.text and advise(found.condition, found.reason)
    rejected = verdict.result == "Rejected"
    assert rejected == (found.effect is Effect.REJECTS)
    if seen.measured is None:
        assert verdict.blocked == (found.effect is Effect.HOLDS)
        assert found.effect is Effect.WAITS or verdict.message == found.text
    output = conditions[found.condition]
    if found.effect is not Effect.WAITS:
        assert (output.reason, output.message) == (found.reason, found.message)
        assert f"{found.condition}: {found.reason}" in explained(seen)
        assert conditions["Ready"].reason == found.reason


@given(st.lists(ENDS, max_size=9))
def test_an_end_that_is_the_node_s_never_rejects(ends: list[Object]) -> None:
    """F70: ends in any order, of which the node's own hold and the engine's own two reject. An
    image of another architecture rejected its revision after 10 s, for good."""
    states = {"aaaaa": RevisionState()}
    own = 0
    for number, end in enumerate(ends):
        last = pod(waiting("CrashLoopBackOff"), end, restarts=number)
        ended = last.ended
        assert ended is not None
        own += ended.of_engine
        states, (last,) = counted(states, (last,))
        found = trouble.of(last)
        assert found is not None
        assert found.effect is not Effect.REJECTS or own >= 2
        if ended.code in (126, 127, 128, 255) and ended.reason != "OOMKilled":
            assert found.effect is Effect.HOLDS
