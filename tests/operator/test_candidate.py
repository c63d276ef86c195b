"""What of a candidate's pods rejects its revision, and what only holds it."""

from __future__ import annotations

from typing import Any

import pytest

from kvline_operator.candidate import blocker, failure, kills
from kvline_operator.candidate import view as view_candidate
from kvline_operator.ended_pods import ended, has_ended, surplus
from kvline_operator.gate import ComparisonGroup
from kvline_operator.kills import dumps, parse
from kvline_operator.observe import PodView, view
from kvline_operator.sizing import Reading

GROUP = ComparisonGroup("hf://org/model", 0)


def pod(code: int, restarts: int, reason: str = "Error", running: bool = False) -> PodView:
    end = {"terminated": {"exitCode": code, "reason": reason, "message": "its words"}}
    now = {"running": {}} if running else {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "server", "restartCount": restarts, "state": now, "lastState": end}
    meta = {"name": "p", "uid": "u", "labels": {}}
    return view({"metadata": meta, "status": {"containerStatuses": [container]}}, Reading(None))


@pytest.mark.parametrize(
    ("what", "code", "reason", "restarts", "rejects", "held"),
    [
        ("once is no failure", 40, "Error", 0, False, ""),
        ("an engine that ends twice", 40, "Error", 1, True, ""),
        ("a shrink and retry", 137, "OOMKilled", 3, False, ""),
        ("and the fifth", 137, "OOMKilled", 5, True, ""),
        ("a kill by the kubelet", 137, "Error", 9, False, "killed (code 137) by the kubelet"),
        ("lost with its node", 137, "ContainerStatusUnknown", 9, False, "killed (code 137)"),
        ("a node that shuts down", 143, "Error", 9, False, "killed (code 143)"),
        ("a device that is lost", 43, "Error", 9, False, "DeviceFailure"),
    ],
)
def test_whose_end_it_was(
    what: str, code: int, reason: str, restarts: int, rejects: bool, held: str
) -> None:
    seen = pod(code, restarts, reason)
    assert bool(failure(seen)) == rejects, what
    assert held in blocker(seen)
    assert bool(blocker(seen)) == bool(held)


def test_kills_are_not_counted_with_the_engine_s_own_ends() -> None:
    """Killed by the kubelet once, then the engine fails once: that is one failure, not two."""
    known = kills({}, (pod(137, 0),))
    assert known == {"u": (1,)}
    assert kills(known, (pod(137, 1, running=True),)) == known, "the same end, seen again"
    assert failure(pod(40, 1)) and not failure(pod(40, 1), known)
    assert "ended 2 times" in failure(pod(40, 2), known)
    twice = kills(known, (pod(143, 2),))
    assert twice == {"u": (1, 3)} and not failure(pod(40, 3), {"u": (1, 2, 3)})
    assert kills(twice, ()) == {}, "what has gone is forgotten"
    held = view_candidate(GROUP, (pod(40, 1),), False, known)
    assert not held.failure and view_candidate(GROUP, (pod(40, 1),), False).failure
    assert parse(dumps(twice)) == twice
    for text in ("", "[]", '{"u": 1}', '{"u": ["x"]}', "{"):
        assert parse(text) == {}


def test_a_pod_that_was_killed_and_runs_again_is_not_hindered() -> None:
    assert blocker(pod(137, 1)) and not blocker(pod(137, 1, running=True))


def terminal(number: int, **status: Any) -> dict[str, Any]:
    meta = {"name": f"p{number:02}", "uid": str(number), "creationTimestamp": f"t{number:02}"}
    return {"metadata": meta, "spec": {}, "status": {"phase": "Failed", **status}}


def test_the_oldest_of_what_ended_for_good_are_too_many_and_each_says_why() -> None:
    pods = ended([terminal(n) for n in range(12)] + [{"metadata": {}, "status": {}}])
    assert [p.name for p in surplus(pods)] == ["p01", "p00"]
    told = terminal(1, reason="Evicted", message="low on memory")
    disrupted = terminal(
        2, conditions=[{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}]
    )
    assert [p.reason for p in ended([told, disrupted, terminal(3)])] == [
        "Failed",
        "PreemptionByScheduler",
        "Evicted",
    ]
    assert ended([told])[0].text == "p01 on no node: Evicted: low on memory"
    assert not has_ended({"metadata": {}, "status": {"phase": "Running"}})
