"""Each end of a server container shows, where no condition has it as an event."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services import BODY, PLAIN, by_type, ended, ready_pod, report, service_state

from kvline_contract.memory import MemoryV1
from kvline_contract.report import Direction, Knob, State, Termination
from kvline_operator.observe.pods import Ended, PodView
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.report import status
from kvline_operator.report.reporter import Reporter
from kvline_operator.report.service_state import newly_ended

ROLLS_OUT = RolloutPlan({"aaaaa": 2, "bbbbb": 1}, "aaaaa", candidate="bbbbb")
OTHER = ready_pod(name="chat-aaaaa-2", uid="u2")
AGAIN = replace(PLAIN, running=True, restarts=1, report=report(State.LOADING))  # after its end


def ends(pods: tuple[PodView, ...], before: tuple[PodView, ...]) -> list[str]:
    state = service_state(*pods, newly_ended=newly_ended(pods, before))
    events = status.build(state, {}, "now")[1]
    return [e.message for e in events if e.reason == "ContainerEnded"]


@pytest.mark.parametrize(
    ("code", "reason"), [(43, "DeviceFailure"), (44, "RankLost"), (45, "NoProgress")]
)
def test_a_stable_replica_that_ends_during_a_rollout_is_named(code: int, reason: str) -> None:
    hangs = replace(AGAIN, ended=ended(code, message="the engine waits for its GPU"))
    new = replace(PLAIN, name="chat-bbbbb-1", uid="u3", revision="bbbbb")
    state = service_state(hangs, OTHER, new, plan=ROLLS_OUT)
    got = by_type(state)["Progressing"]
    assert (got.status, got.reason) == ("False", reason)
    assert got.message == "chat-aaaaa-1: the engine waits for its GPU"
    assert reason in {e.reason for e in status.build(state, {}, "now")[1]}
    back = replace(OTHER, uid="u1", name="chat-aaaaa-1", ended=hangs.ended)
    assert by_type(service_state(back, OTHER, new, plan=ROLLS_OUT))["Progressing"].status == "True"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ended(0), "was killed (code 0)"),
        (ended(137), "was killed (code 137)"),
        (Ended(137, "OOMKilled", None, ""), "with code 137 (OOMKilled)"),
        (ended(45), "with code 45 (NoProgress): why"),
    ],
)
def test_an_end_beside_a_replica_that_serves_is_one_event(end: Ended, words: str) -> None:
    before = (replace(OTHER, uid="u1", name="chat-aaaaa-1"), OTHER)
    after = (replace(PLAIN, ended=end), OTHER)
    (text,) = ends(after, before)
    assert text.startswith("chat-aaaaa-1 on n1: end 1 of its container") and words in text
    assert not ends(after, after)
    assert not ends((replace(AGAIN, ended=end), OTHER), after)  # runs again: the same end


PARTS = "of 1250 MiB weights 513 MiB, activations 86 MiB, headroom 59 MiB, others 592 MiB"
CONTEXT = f"spec.engine.maxModelLen is 2048, the budget holds 1000 tokens; {PARTS}; it would help"
KILLED = f"killed for memory while probing with the smallest KV cache: {PARTS}; it would help"
SLOTS = f"the recurrent states of 8 requests do not fit: {PARTS}; it would help"
FEWER = Knob("spec.engine.maxRunningRequests", Direction.LOWER, 2)
KEPT = Knob("spec.engine.prefixSnapshots", Direction.LOWER, 4)
SHORTER = Knob("spec.engine.maxModelLen", Direction.LOWER, 992)
LARGER = Knob("spec.resources.memory", Direction.RAISE, 1296)
UNKNOWN = Knob("spec.resources.memory", Direction.RAISE)


@pytest.mark.parametrize(
    ("message", "knobs", "words"),
    [
        (
            CONTEXT,
            (SHORTER, LARGER),
            "spec.engine.maxModelLen is 2048, the budget holds 1000 tokens; lower "
            "spec.engine.maxModelLen to 992 or raise spec.resources.memory to 1296Mi",
        ),
        (
            KILLED,
            (UNKNOWN,),
            "killed for memory while probing with the smallest KV cache; raise "
            "spec.resources.memory",
        ),
        (
            SLOTS,
            (replace(FEWER, with_next=True), KEPT, LARGER),
            "the recurrent states of 8 requests do not fit; lower spec.engine.maxRunningRequests "
            "to 2 and lower spec.engine.prefixSnapshots to 4 or raise spec.resources.memory to "
            "1296Mi",
        ),
        (KILLED, (), "killed for memory while probing with the smallest KV cache"),
    ],
)
def test_an_event_has_what_happened_and_what_helps_but_not_the_memory_by_part(
    message: str, knobs: tuple[Knob, ...], words: str
) -> None:
    memory = MemoryV1(1250, 513, 86, 0, 0, 59, 592)
    found = Termination(1, 41, "ContextDoesNotFit", message, memory, knobs=knobs)
    failed = replace(AGAIN, ended=Ended(41, "Error", found, message))
    (text,) = ends((failed, OTHER), (replace(OTHER, uid="u1"),))
    assert text.endswith(f"with code 41 (ContextDoesNotFit): {words}")
    known = status.diagnosis(service_state(failed))
    assert known["message"] == message, "which the status keeps"


def test_an_end_that_no_reconcile_saw_is_an_event_while_the_container_runs_again() -> None:
    after = replace(AGAIN, ended=ended(0))
    assert len(ends((after,), (ready_pod(),))) == 1
    second = replace(after, restarts=2)
    assert ends((second,), (after,)) != ends((after,), (ready_pod(),))
    assert not ends((after,), ())  # an operator that has just begun


def test_an_event_is_written_where_the_status_stays_as_it_is() -> None:
    written: list[Any] = []
    kube = SimpleNamespace(create=written.append)  # and no write of the status
    now = datetime(2026, 1, 1, tzinfo=UTC)
    reporter = Reporter(cast(Any, kube), cast(Any, None), cast(Any, None), lambda: now)
    body = {**BODY, "status": {"model": "x"}}
    body["metadata"] = {**BODY["metadata"], "resourceVersion": "7"}
    event = status.Event("ContainerEnded", "Warning", "why")
    reporter._write(body, {"model": "x"}, [event], None)
    assert [e["reason"] for e in written] == ["ContainerEnded"]
