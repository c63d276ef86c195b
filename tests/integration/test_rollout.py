"""The rollout gate against a real API server: no candidate takes traffic before its budget is
validated, and what was decided outlives the operator."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest
from rolling import Service, is_ready, up_to_date
from waiting import eventually

from kvline_contract.names import GATE_FILE, LABEL_SERVICE, OPEN_GATE_PATH, gate_name
from kvline_contract.report import Binding, Direction, Knob, Termination
from kvline_operator.store.revision_state import RevisionState, read, to_annotations

pytestmark = pytest.mark.integration

BIGGER, SMALLER = {"maxModelLen": 2048}, {"maxModelLen": 2047}


def test_a_candidate_is_measured_alone_and_then_takes_over_replica_by_replica(
    service: Service, space: Any
) -> None:
    stable = service.stable()
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    eventually(lambda: len(service.pods_of(candidate)) == 1)
    service.poll()
    assert len(service.pods_of(stable)) == 2 and candidate not in service.served
    service.tokens[candidate] = 3900
    status = service.until_reason("UpToDate")
    gate = status["rollout"]["gate"]
    assert {k: gate[k] for k in ("revision", "result", "measured", "required")} == {
        "revision": candidate,
        "result": "Passed",
        "measured": 3900,
        "required": 3892,
    }
    assert status["rollout"]["stableRevision"] == candidate
    assert service.events("GatePassed") == [
        f"revision {candidate}: measured 3900 KV tokens, 3892 are required "
        "(95 % of the baseline 4096 on a CPU)"
    ]
    assert service.fewest_ready == 2
    eventually(lambda: len(service.node.pods()) == 2)


def test_a_candidate_takes_over_before_its_opened_gate_file_has_arrived(
    service: Service, space: Any
) -> None:
    """A kubelet brings a changed file within a minute or so: here it never does."""
    service.node.gates = {}
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    service.until(lambda s: service.pods_of(candidate))
    (pod,) = service.pods_of(candidate)
    service.tokens[candidate] = 4096
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == candidate and service.fewest_ready == 2
    assert not json.loads(service.node.gates[pod["metadata"]["uid"]])["open"]
    space.apply(replicas=2, engine=SMALLER)
    rejected = service.candidate()
    service.until(lambda s: service.pods_of(rejected))
    address = service.node.addresses
    known = {p["metadata"]["uid"] for p in service.pods_of(rejected)}
    service.tokens[rejected] = 2048
    service.until_reason("RevisionRejected")
    assert not {address[uid] for uid in known} & {at for at, _ in list(service.node.posts)}


def test_after_a_restart_of_the_operator_an_opened_gate_file_arrives_itself(
    service: Service, space: Any, operator: Any
) -> None:
    """The token of its notices was in the memory of the one that is gone, and the pod knows no
    other until the kubelet brings it a changed file."""
    service.node.gates = {}
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    (pod,) = service.until_pods(candidate, 1)
    uid = pod["metadata"]["uid"]
    name = gate_name(pod["metadata"]["labels"][LABEL_SERVICE], candidate)
    service.node.gates[uid] = space.get("configmap", name)["data"][GATE_FILE]
    operator.stop()
    operator.start()
    service.tokens[candidate] = 4096
    path = f"{OPEN_GATE_PATH}?uid={uid}"
    service.until(lambda s: (service.node.addresses.get(uid), path) in service.node.posts)
    service.poll()
    assert candidate not in service.served
    assert service.events("GatePassed")
    del service.node.gates[uid]  # the kubelet brings what is there now
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == candidate and service.fewest_ready == 2


def test_half_the_budget_is_rejected_until_the_spec_or_a_promotion_says_otherwise(
    service: Service, space: Any, operator: Any
) -> None:
    first = service.stable()
    before = {p["metadata"]["uid"] for p in service.node.pods()}
    space.apply(replicas=2, engine=SMALLER)
    rejected = service.candidate()
    service.tokens[rejected] = 2048
    status = service.until_reason("RevisionRejected")
    assert status["rollout"]["rejectedRevision"] == rejected
    assert status["rollout"]["stableRevision"] == first
    assert (
        "2048 KV tokens, 3892 are required (95 % of the baseline 4096 on a CPU): 1844 short"
        in (up_to_date(status)["message"])
    )
    assert len(service.events("RevisionRejected")) == 1
    assert rejected not in service.served and service.fewest_ready == 2
    assert {p["metadata"]["uid"] for p in service.node.pods() if is_ready(p)} == before

    operator.stop(signal.SIGKILL)
    operator.start()  # after the restart too
    service.until(lambda s: len(service.node.pods()) == 2)
    space.kubectl("annotate", "kvl", "chat", "touched=yes")
    service.until_reason("RevisionRejected")
    assert not service.pods_of(rejected)

    space.apply(replicas=2)  # the old spec again: no pod restarts, the rejection is dropped
    service.until_reason("UpToDate")
    assert {p["metadata"]["uid"] for p in service.node.pods()} == before
    verdict = stored(space, rejected).verdict
    assert verdict is not None and (verdict.result, verdict.against) == ("Rejected", 0)
    space.apply(replicas=2, engine=SMALLER)
    service.until_reason("RevisionRejected")
    assert len(service.events("RevisionRejected")) == 2

    promoted = json.dumps({"spec": {"rollout": {"promote": rejected}}})
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", promoted)
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == rejected
    assert status["capacity"]["kvTokens"] == 2048
    verdict = stored(space, rejected).verdict
    assert verdict is not None and verdict.promoted
    assert stored(space, rejected).baseline == {"": 2048}


def test_small_losses_do_not_add_up(service: Service, space: Any) -> None:
    """3,950 of 4,096 passes. 3,800 is 96 % of that but 93 % of the baseline, and is accepted when
    minCapacityPercent is lowered."""
    for length, tokens, reason in ((2048, 3950, "UpToDate"), (2047, 3800, "RevisionRejected")):
        space.apply(replicas=2, engine={"maxModelLen": length})
        service.tokens[service.candidate()] = tokens
        status = service.until_reason(reason)
    assert status["rollout"]["gate"]["baseline"] == 4096
    lenient = {"minCapacityPercent": 92}
    space.apply(replicas=2, engine={"maxModelLen": 2047}, rollout=lenient)
    status = service.until_reason("UpToDate")
    assert status["rollout"]["gate"]["required"] == 3769


def test_another_model_is_held_until_a_minimum_says_what_is_enough(
    service: Service, space: Any
) -> None:
    model = {"source": "pvc://models/other"}
    space.apply(replicas=2, model=model)
    candidate = service.candidate()
    service.tokens[candidate] = 4096
    service.until(lambda s: "cannot be compared" in up_to_date(s)["message"])
    assert up_to_date(service.poll())["reason"] == "GateHeld"
    assert candidate not in service.served
    space.apply(replicas=2, model=model, capacity={"minKVTokens": 4000})
    status = service.until_reason("UpToDate")
    assert status["rollout"]["gate"]["required"] == 4000
    assert service.fewest_ready == 2


def test_another_dtype_of_the_cache_is_held_and_not_judged_by_the_percentage(
    service: Service, space: Any
) -> None:
    """Twice the tokens of half the bytes say nothing of a loss of memory: to fp8 and back. Once a
    minimum is given it alone counts, and what is accepted begins a baseline of its own."""
    fp8 = {"kvCacheDtype": "fp8"}
    space.apply(replicas=2, engine=fp8)
    candidate = service.candidate()
    service.tokens[candidate] = 8100
    status = service.until(lambda s: "cannot be compared" in up_to_date(s)["message"])
    assert "spec.engine.kvCacheDtype is fp8, not auto" in up_to_date(status)["message"]
    assert up_to_date(service.poll())["reason"] == "GateHeld"
    assert space.condition("CapacitySufficient")["reason"] == "NotComparable"
    assert candidate not in service.served
    space.apply(replicas=2, engine=fp8, capacity={"minKVTokens": 8000})
    status = service.until_reason("UpToDate")
    assert status["rollout"]["gate"]["required"] == 8000
    assert status["rollout"]["stableRevision"] == candidate
    space.apply(replicas=2, engine=fp8 | BIGGER)  # compared with fp8 from now on
    service.tokens[service.candidate()] = 7600
    status = service.until_reason("RevisionRejected")
    assert status["rollout"]["gate"]["baseline"] == 8100
    space.apply(replicas=2, engine=BIGGER)
    back = service.candidate()
    service.tokens[back] = 4050
    status = service.until(lambda s: "kvCacheDtype is auto, not fp8" in up_to_date(s)["message"])
    assert up_to_date(status)["reason"] == "GateHeld" and back not in service.served
    assert service.fewest_ready == 2


@pytest.mark.fault(
    "F35", shows="a candidate's pod may be evicted, one ready replica too, a second one has to wait"
)
def test_a_candidate_that_waits_at_its_gate_blocks_no_drain(service: Service, space: Any) -> None:
    """Its own node and that of one ready replica can be drained; a second ready replica has to
    wait."""
    stable = service.stable()
    space.apply(replicas=2, model={"source": "pvc://models/other"})
    candidate = service.candidate()
    service.tokens[candidate] = 4096
    service.until_reason("GateHeld")
    (held,) = service.pods_of(candidate)
    assert evict(space, held) == ""
    eventually(lambda: [p for p in service.pods_of(candidate) if p != held])
    first, second = service.pods_of(stable)
    service.tokens.pop(stable)  # the evicted replica is not back yet
    eventually(lambda: allowed(space) == 1)
    assert evict(space, first) == ""
    eventually(lambda: allowed(space) == 0)
    assert "disruption budget" in evict(space, second)
    service.tokens[stable] = 4096
    service.until(lambda s: allowed(space) == 1)


def evict(space: Any, pod: dict[str, Any]) -> str:
    """Requests an eviction as a drain does. Returns why it was refused; empty if it was not."""
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    where = f"/api/v1/namespaces/{space.name}/pods/{name}/eviction"
    done = space.kubectl("create", "--raw", where, "-f", "-", input=json.dumps(body), check=False)
    return str(done.stderr) if done.returncode else ""


def allowed(space: Any) -> int:
    return int(space.get("poddisruptionbudgets", "chat")["status"].get("disruptionsAllowed", -1))


def test_recreate_frees_the_old_ones_first_and_comes_back_after_a_failure(
    service: Service, space: Any
) -> None:
    first = service.stable()
    how = {"strategy": "Recreate"}
    space.apply(replicas=2, engine=SMALLER, rollout=how)
    candidate = service.candidate()
    service.until(lambda s: not service.pods_of(first) and len(service.pods_of(candidate)) == 2)
    service.tokens[candidate] = 2000
    service.until_reason("RevisionRejected")
    service.until(lambda s: s["readyReplicas"] == 2 and len(service.pods_of(first)) == 2)
    assert candidate not in service.served


@pytest.mark.fault(
    "F36", shows="what Recreate took away for a candidate that is held comes back at the deadline"
)
def test_recreate_brings_back_what_served_when_the_candidate_gets_no_further(
    service: Service, space: Any
) -> None:
    """A held candidate under Recreate: the old replicas come back at progressDeadlineSeconds, and
    say so where a quota keeps their pods out, though the spec still means the rejected one."""
    first = service.stable()
    how = {"strategy": "Recreate", "progressDeadlineSeconds": 600}  # age() lets it pass
    space.apply(replicas=2, model={"source": "pvc://models/other"}, rollout=how)
    candidate = service.candidate()
    service.tokens[candidate] = 4096
    status = service.until_reason("GateHeld")
    status = service.until(lambda s: s["readyReplicas"] == 0)
    assert up_to_date(status)["message"].endswith("; nothing serves meanwhile")
    # Both, or the deadline names the one that has no node yet and not what was measured.
    service.until(
        lambda _: (
            [bool(p["status"].get("podIP")) for p in service.pods_of(candidate)] == [True, True]
        )
    )
    full = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", **full}
    space.kubectl("create", "-f", "-", input=json.dumps(quota))
    eventually(lambda: "used" in (space.get("resourcequota", "full").get("status") or {}))
    age(space, candidate)
    service.until(lambda s: space.condition("Progressing")["reason"] == "QuotaExceeded")
    space.kubectl("delete", "resourcequota", "full")
    status = service.until_reason("RevisionRejected")
    assert (
        "spec.rollout.progressDeadlineSeconds (600): measured 4096"
        in (up_to_date(status)["message"])
    )
    status = service.until(lambda s: s["readyReplicas"] == 2 and not service.pods_of(candidate))
    assert f"{first} serves" in up_to_date(status)["message"]
    assert candidate not in service.served and service.served == {first}
    assert len(service.events("RevisionRejected")) == 1


def age(space: Any, revision: str) -> None:
    """Moves the start of a candidate's deadline an hour back."""
    found = stored(space, revision)
    assert found.missing_since
    ((key, text),) = to_annotations(replace(found, missing_since="2026-01-01T00:00:00Z")).items()
    name = f"chat-{revision}"
    space.kubectl("annotate", "--overwrite", "controllerrevision", name, f"{key}={text}")


def stored(space: Any, revision: str) -> RevisionState:
    return read(space.get("controllerrevisions", f"chat-{revision}"))


def test_replace_measures_in_the_place_of_one_and_never_lacks_two(
    service: Service, space: Any
) -> None:
    """As on a cluster whose GPUs are all in use: never more pods than replicas."""
    first = service.stable()
    most = 0
    space.apply(replicas=2, engine=SMALLER, rollout={"strategy": "Replace"})
    candidate = service.candidate()
    service.until(lambda s: len(service.pods_of(first)) == len(service.pods_of(candidate)) == 1)
    service.tokens[candidate] = 4096

    def done(status: dict[str, Any]) -> bool:
        nonlocal most
        most = max(most, sum(d["spec"]["replicas"] for d in space.list("deployments")))
        (ready,) = (c for c in status["conditions"] if c["type"] == "Ready")
        assert ready["status"] == "True", ready
        return bool(up_to_date(status).get("reason") == "UpToDate")

    status = service.until(done)
    assert status["rollout"]["stableRevision"] == candidate
    assert service.fewest_ready == 1 and most == 2


def test_an_engine_that_ends_twice_is_rejected_and_one_that_waits_is_held(
    service: Service, space: Any
) -> None:
    space.apply(replicas=2, engine=SMALLER)
    candidate = service.candidate()
    (pod,) = eventually(lambda: service.pods_of(candidate))
    status = service.until_reason("GateHeld")  # the scheduler finds no node here
    assert f"{pod['metadata']['name']} has no node" in up_to_date(status)["message"]
    knobs = (Knob("spec.resources.memory", Direction.RAISE, 3072),)
    ended = Termination(1, 40, "OutOfMemory", "40 MiB short", None, Binding.WEIGHTS, None, knobs)
    service.node.crash(pod, 40, ended.dumps())
    status = service.until(lambda s: s.get("diagnosis", {}).get("code") == 40)
    assert status["rollout"]["candidateRevision"] == candidate, "once is no failure"
    service.node.crash(pod, 40, ended.dumps())
    status = service.until_reason("RevisionRejected")
    assert (
        "ended 2 times, with code 40 (OutOfMemory): 40 MiB short" in (up_to_date(status)["message"])
    )
    service.until(lambda s: not service.pods_of(candidate))
    diagnosis = service.poll()["diagnosis"]
    assert (diagnosis["revision"], diagnosis["binding"]) == (candidate, "Weights")
    assert diagnosis["knobs"] == [
        {"field": "spec.resources.memory", "direction": "raise", "value": 3072}
    ]
    explained = space.kvline("explain", "chat").stdout
    assert "would help: raise spec.resources.memory to 3072Mi" in explained
    assert service.fewest_ready == 2


@pytest.mark.timeout(300)
def test_a_spec_that_changes_on_the_way_and_a_pause_keep_what_serves(
    service: Service, space: Any
) -> None:
    """Paused half-way, then a third spec: two replicas are ready all the time."""
    first = service.stable()
    space.apply(replicas=2, engine=BIGGER)
    second = service.candidate()
    service.tokens[second] = 4096
    service.until(lambda s: second in service.served)
    space.kvline("pause", "chat")
    space.apply(replicas=2, engine={"maxModelLen": 2046})
    status = service.until(lambda s: s["rollout"]["candidateRevision"] not in (first, second, ""))
    assert up_to_date(status)["reason"] == "Paused"
    third = status["rollout"]["candidateRevision"]
    assert not service.pods_of(third)
    # A pause stops neither scaling nor repair.
    space.kubectl("scale", "kvl", "chat", "--replicas=3")
    service.until(lambda s: len([p for p in service.pods_of(first) if is_ready(p)]) == 3)
    # Orphaning is the garbage collector's, which waits while it learns of new resources.
    deployment = f"chat-{first}"
    uid = space.get("deployment", deployment)["metadata"]["uid"]
    space.kubectl("delete", "deployment", deployment, "--cascade=orphan", "--wait=false")

    def repaired(status: dict[str, Any]) -> bool:
        found = space.get("deployment", deployment)
        return bool(found and found["metadata"]["uid"] != uid and status["readyReplicas"] == 3)

    service.until(repaired, seconds=180, on="garbage collector")
    assert not service.pods_of(third)
    service.tokens[third] = 4096
    space.kvline("resume", "chat")
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] not in (first, second)
    assert service.fewest_ready == 2


def test_scaling_during_a_rollout_ends_with_all_of_the_new_revision(
    service: Service, space: Any
) -> None:
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    space.kubectl("scale", "kvl", "chat", "--replicas=3")
    service.until(
        lambda s: len(service.node.pods()) == 4
    )  # three stable replicas stay beside the first new one
    service.tokens[candidate] = 4096
    status = service.until_reason("UpToDate")
    assert (status["rollout"]["stableRevision"], status["readyReplicas"]) == (candidate, 3)
    assert service.fewest_ready >= 2


def test_an_accepted_revision_that_measures_less_serves_warns_and_can_be_promoted(
    service: Service, space: Any, operator: Any
) -> None:
    """Pods of the stable revision are replaced, and a container restarts with another driver, both
    measuring less: only minKVTokens keeps them out, the loss is reported with its figures, and
    promoting makes it the new baseline."""
    space.apply(replicas=2, engine=BIGGER)
    revision = service.candidate()
    service.tokens[revision] = 4096
    service.until_reason("UpToDate")
    operator.stop(signal.SIGKILL)
    _lose_one(service, space, revision, 3891, ready=2)
    service.node.was_ready.clear()
    service.tokens[revision] = 2000
    service.poll()
    assert sum(map(is_ready, service.node.pods())) == 2
    operator.start()
    service.until(lambda s: space.condition("CapacityStable").get("reason") == "BelowBaseline")
    stable, sufficient = (space.condition(f"Capacity{t}") for t in ("Stable", "Sufficient"))
    figures = "2000 KV tokens, 3892 are expected (95 % of the baseline 4096 on a CPU): 1892 short"
    assert figures in stable["message"] and service.events("BelowBaseline") == [stable["message"]]
    assert (sufficient["status"], service.poll()["readyReplicas"]) == ("True", 2)

    assert f"revision {revision}" in space.kvline("promote", "chat").stdout
    service.until(lambda s: space.condition("CapacityStable")["reason"] != "BelowBaseline")
    twice = space.kvline("promote", "chat", revision, check=False)
    assert f"spec.rollout.promote is {revision} already" in twice.stderr
    assert stored(space, revision).baseline == {"": 2000}
    space.apply(replicas=2, engine=BIGGER, capacity={"minKVTokens": 2500})
    service.until(lambda s: space.condition("CapacitySufficient")["status"] == "False")
    service.node.was_ready.clear()
    service.until(lambda s: s["readyReplicas"] == 0)
    # Without a ready replica the figures stay, with their time; they are not read from the status.
    wiped = json.dumps({"status": {"capacity": None}})
    space.kubectl("patch", "kvl", "chat", "--subresource=status", "--type=merge", "-p", wiped)
    kept = service.until(lambda s: "capacity" in s)["capacity"]
    assert (kept["kvTokens"], kept["kvTokensTotal"], kept["serving"]) == (2000, 0, False)
    assert kept["asOf"] and "No replica serves; the last one had 2,000 KV tokens" in (
        space.kvline("explain", "chat").stdout
    )
    message = space.condition("CapacitySufficient")["message"]
    assert (
        "2500 are required (spec.capacity.minKVTokens): 500 short, it takes no traffic" in message
    )


def _lose_one(service: Service, space: Any, revision: str, tokens: int, ready: int) -> None:
    """Deletes a pod; its replacement measures `tokens`, and then so many are ready."""
    gone = service.node.pods()[0]["metadata"]
    service.tokens[revision] = tokens
    space.kubectl("delete", "pod", gone["name"], "--grace-period=0", "--force")

    def replaced() -> bool:
        service.poll()
        pods = service.node.pods()
        known = {p["metadata"]["uid"] for p in pods}
        return len(pods) == 2 and gone["uid"] not in known and sum(map(is_ready, pods)) == ready

    eventually(replaced, 60)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("first", "tokens", "reason"), [(1, 4096, "UpToDate"), (2, 2048, "RevisionRejected")]
)
def test_killing_the_operator_at_each_write_of_a_rollout_ends_in_the_same_state(
    service: Service, space: Any, operator: Any, first: int, tokens: int, reason: str
) -> None:
    """F01: the operator is killed after every second write of a rollout that passes and after the
    others of one that is rejected, which share most of them."""
    reached = 0
    for write in range(first, 40, 2):
        stable = service.poll()["rollout"]["stableRevision"]
        operator.stop(signal.SIGKILL)
        operator.extra = {"KVLINE_FAULT_WRITE": f"{write}:after"}
        space.apply(replicas=2, engine={"maxModelLen": 1000 + write})
        operator.start()
        died, candidate = _roll(service, operator, tokens, reason)
        assert service.fewest_ready == 2, write
        expected = candidate if reason == "UpToDate" else stable
        assert service.poll()["rollout"]["stableRevision"] == expected, write
        assert {service.revision(p) for p in service.node.pods()} == {expected}, write
        if not died:
            break
        reached = write
    assert reached >= 6, reached


def _roll(service: Service, operator: Any, tokens: int, reason: str) -> tuple[bool, str]:
    """Runs a rollout to its end and restarts the operator where it was killed. Returns whether it
    was, and the candidate."""
    died, before = False, set(service.tokens)

    def looked() -> bool:
        nonlocal died
        if operator.process.poll() is not None:
            assert operator.process.returncode == 9, "of something else than the fault"
            died, operator.extra = True, {}
            operator.start()
        status = service.poll()
        for pod in service.node.pods():
            service.tokens.setdefault(service.revision(pod), tokens)
        new = set(service.tokens) - before
        return (
            bool(new)
            and up_to_date(status).get("reason") == reason
            and (
                status["observedGeneration"]
                == service.space.get("kvl", "chat")["metadata"]["generation"]
                and len(service.node.pods()) == 2
            )
        )

    eventually(looked, 60)
    return died, (set(service.tokens) - before).pop()
