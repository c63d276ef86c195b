"""What in a candidate's pods rejects its revision, and what only holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvline_contract.report import Current, SizingReport, State
from kvline_operator.observe import trouble
from kvline_operator.observe.children import awaiting, leaving, needless_waits
from kvline_operator.observe.ended_pods import HISTORY_LIMIT, ended, has_ended
from kvline_operator.observe.pods import PodView, view
from kvline_operator.observe.reports import Reading
from kvline_operator.observe.trouble import Effect
from kvline_operator.plan.candidate import counted
from kvline_operator.plan.candidate import view as view_candidate
from kvline_operator.plan.gate import ComparisonGroup
from kvline_operator.store import revision_state
from kvline_operator.store.container_ends import Ends
from kvline_operator.store.revision_state import RevisionState

GROUP = ComparisonGroup("hf://org/model", 0)


def pod(
    code: int, restarts: int, reason: str = "Error", running: bool = False, gpus: int = 0
) -> PodView:
    end = {"terminated": {"exitCode": code, "reason": reason, "message": "its words"}}
    now = {"running": {}} if running else {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "server", "restartCount": restarts, "state": now, "lastState": end}
    meta = {"name": "p", "uid": "u", "labels": {"kvline.dev/revision": "b"}}
    limits = {"memory": "2Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    spec = {"containers": [{"name": "server", "resources": {"limits": limits}}]}
    status = {"containerStatuses": [container]}
    return view({"metadata": meta, "spec": spec, "status": status}, Reading(None))


def blocker(seen: PodView) -> str:
    """What holds the gate."""
    found = trouble.of(seen)
    return found.text if found is not None and found.effect is Effect.HOLDS else ""


End = tuple[int, str]
OWN, OOM, KILLED, CLEAN = (40, "Error"), (137, "OOMKilled"), (137, "Error"), (0, "Completed")


def after(*ends: End, gpus: int = 0) -> PodView:
    """A pod whose container ended so, one after another, each end seen twice: as it waits, and as
    it runs again. Annotations are all that is kept in between."""
    states = {"b": RevisionState()}
    for number, (code, reason) in enumerate(ends):
        for restarts, running in ((number, False), (number + 1, True)):
            last = pod(code, restarts, reason, running, gpus)
            states, (last,) = counted(states, (last,))
            kept = revision_state.to_annotations(states["b"])
            states = {"b": revision_state.read({"metadata": {"annotations": kept}})}
    return last


@pytest.mark.parametrize(
    ("what", "ends", "rejects"),
    [
        ("once is no failure", [OWN], False),
        ("an engine that fails twice", [OWN, OWN], True),
        ("and with two codes", [OWN, (50, "Error")], True),
        ("a shrink and retry", [OOM] * 4, False),
        ("and the fifth", [OOM] * 5, True),
        ("a shrink, then its first failure", [OOM, OOM, OWN], False),
        ("kills by the kubelet", [KILLED] * 9, False),
        ("lost with its node", [(137, "ContainerStatusUnknown")] * 9, False),
        ("lost by a runtime that was restarted", [(255, "Unknown")] * 9, False),
        ("a program that is not in the image", [(128, "StartError")] * 9, False),
        ("a shell that does not find it", [(127, "Error")] * 9, False),
        ("an image of another architecture", [(255, "Error")] * 9, False),
        (
            "a driver's hook that fails, then its first failure",
            [(128, "StartError")] * 9 + [OWN],
            False,
        ),
        ("a node that shuts down", [(143, "Error")] * 9, False),
        ("a device that is lost", [(43, "Error")] * 9, False),
        ("a rank that is lost", [(44, "Error")] * 9, False),
        ("a pod that hung while it served", [(45, "Error")] * 9, False),
        ("a step that is too long", [(42, "Error")] * 2, True),
        ("a Secret that was missing, then its first failure", [(22, "Error")] * 5 + [OWN], False),
        ("and then its first kill for memory", [(22, "Error")] * 5 + [OOM], False),
        ("a model that was missing", [(30, "Error"), (33, "Error"), OWN], False),
        ("kills by the kubelet, then its first failure", [KILLED] * 5 + [OWN], False),
        ("and then its first kill for memory", [KILLED] * 5 + [OOM], False),
        ("a probe's SIGTERM that it answered", [CLEAN, OWN], False),
        ("each kind once, then its second failure", [OWN, KILLED, CLEAN, OOM, OWN], True),
    ],
)
def test_an_engine_s_own_failures_reject(what: str, ends: list[End], rejects: bool) -> None:
    seen = view_candidate(GROUP, (after(*ends),), promoted=False)
    assert bool(seen.failure) == rejects, what


def test_too_little_host_memory_beside_a_gpu_rejects_at_the_second_kill() -> None:
    """A smaller KV cache was tried five times, each after a longer back-off, while nothing served:
    on a GPU it takes no host memory."""
    group = replace(GROUP, gpus=1)
    assert not view_candidate(group, (after(OOM, gpus=1),), promoted=False).failure
    seen = view_candidate(group, (after(OOM, OOM, gpus=1),), promoted=False)
    assert "at its memory limit of 2Gi, which is host memory, kill 2" in seen.failure
    assert "raise spec.resources.memory" in seen.failure


@pytest.mark.parametrize(
    ("code", "reason", "held"),
    [
        (40, "Error", ""),
        (137, "OOMKilled", ""),
        (137, "Error", "killed (code 137) by the kubelet"),
        (137, "ContainerStatusUnknown", "killed (code 137)"),
        (143, "Error", "killed (code 143)"),
        (43, "Error", "DeviceFailure"),
        (44, "Error", "RankLost"),
        (45, "Error", "NoProgress"),
        (0, "Completed", "killed (code 0) by the kubelet"),
        (255, "Unknown", "killed (code 255)"),
        (128, "StartError", "not started: its words"),
        (128, "ContainerCannotRun", "not started: its words"),
        (127, "Error", "not started: its words"),
    ],
)
def test_an_end_that_is_not_the_engine_s_holds(code: int, reason: str, held: str) -> None:
    seen = pod(code, 3, reason)
    assert held in blocker(seen) and bool(blocker(seen)) == bool(held)


def test_ends_are_counted_by_their_number_and_go_with_their_pod() -> None:
    states, (seen,) = counted({"b": RevisionState()}, (pod(40, 0),))
    assert states["b"].ends == {"u": Ends((1,))} and seen.failures == 1
    states, (seen,) = counted(states, (pod(40, 7),))
    assert states["b"].ends == {"u": Ends((1, 8))}, "what was not seen is not counted"
    found = trouble.of(seen)
    assert found is not None and found.effect is Effect.REJECTS
    assert found.text == "p ended 2 times, with code 40 (OutOfMemory): its words"
    states, (other,) = counted(states, (replace(pod(40, 0), revision="c"),))
    assert (other.failures, states["b"].ends) == (0, {})


def test_a_pod_that_was_killed_and_runs_again_is_not_hindered() -> None:
    assert blocker(pod(137, 1)) and not blocker(pod(137, 1, running=True))


def terminal(number: int, **status: Any) -> dict[str, Any]:
    meta = {"name": f"p{number:02}", "uid": str(number), "creationTimestamp": f"t{number:02}"}
    return {"metadata": meta, "spec": {}, "status": {"phase": "Failed", **status}}


def placed(revision: str, node: str = "n", ends: str = "", phase: str = "Running") -> Any:
    meta: dict[str, Any] = {"name": f"p-{revision}", "labels": {"kvline.dev/revision": revision}}
    meta |= {"deletionTimestamp": ends} if ends else {}
    return {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("pods", "leaves"),
    [
        ([placed("a")], ""),
        ([placed("a", ends="t5")], "p-a"),
        ([placed("a", ends="t4")], ""),  # stuck
        ([placed("a", "", ends="t5")], ""),
        ([placed("a", ends="t5", phase="Failed")], ""),
        ([placed("a"), placed("a")], "p-a"),  # of two its Deployment wants one
        ([placed("a"), placed("a", "")], ""),
        ([placed("b")], "p-b"),  # scaled to none
        ([placed("c")], "p-c"),  # its Deployment is gone
    ],
)
def test_a_pod_leaves_its_node_within_its_grace_period_or_soon(pods: Any, leaves: str) -> None:
    counts = [placed("a") | {"spec": {"replicas": 1}}, placed("b") | {"spec": {"replicas": 0}}]
    assert leaving(pods, counts, "t4") == leaves


AT = (("a", "10.0.0.1"),)


@pytest.mark.parametrize(
    ("lack", "ready", "ends", "addresses"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", False, "t5", AT),
        ("0/1 nodes are available: 1 cannot allocate all claims.", False, "t5", AT),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", False, "t5", ()),  # a drain
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", True, "t5", ()),
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", False, "t4", ()),  # stuck
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", False, "", ()),
    ],
)
def test_a_wait_that_serves_nobody_is_ended(
    lack: str, ready: bool, ends: str, addresses: tuple[tuple[str, str], ...]
) -> None:
    old = placed("a", ends=ends)
    old["status"]["podIP"] = "10.0.0.1"
    new = awaiting(replace(pod(0, 0), ended=None, unschedulable=lack), "p-a")
    others = (replace(pod(0, 0), ready=True),) if ready else ()
    assert needless_waits((new, *others), [old], "t4") == addresses
    assert needless_waits((replace(new, awaits=""),), [old], "t4") == ()


def test_of_terminal_pods_the_oldest_are_deleted_and_each_has_its_reason() -> None:
    pods = ended([terminal(n) for n in range(12)] + [{"metadata": {}, "status": {}}])
    assert [p.name for p in pods[HISTORY_LIMIT:]] == ["p01", "p00"]
    evicted = terminal(1, reason="Evicted", message="low on memory")
    disrupted = terminal(
        2, conditions=[{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}]
    )
    assert [p.reason for p in ended([evicted, disrupted, terminal(3)])] == [
        "Failed",
        "PreemptionByScheduler",
        "Evicted",
    ]
    assert ended([evicted])[0].text == "p01 on no node: Evicted: low on memory"
    assert ended([terminal(3)])[0].text.endswith(": Failed")
    in_time = ended([terminal(4, phase="Succeeded")])[0]  # the kubelet kept no reason
    assert in_time.reason == "Succeeded" and "evicted, or its node shut down" in in_time.text
    assert not has_ended({"metadata": {}, "status": {"phase": "Running"}})


def test_a_candidate_that_is_measured_is_shown_by_the_stage_of_its_start() -> None:
    at = Current(3, 4, "measures the largest steps", "2026-01-01T00:00:00Z", 5, 60)
    report = SizingReport("u", "p", "b", 1, State.STRESSING, "t", "t", current=at)
    seen = replace(pod(0, 0, running=True), report=report)
    text = "p: stage 3 of 4: measures the largest steps, since 2026-01-01T00:00:00Z"
    assert view_candidate(GROUP, (seen,), False).stage == text
    earlier = replace(seen, report=replace(report, current=None))
    assert view_candidate(GROUP, (earlier,), False).stage == "p: Stressing"
