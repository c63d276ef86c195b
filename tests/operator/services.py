"""Services as the operator sees them, in any state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_contract.launch import Record
from kvline_contract.memory import (
    ENCODER_CACHE,
    ENCODER_WORK,
    TOWER,
    Memory,
    MemoryV1,
    Part,
)
from kvline_contract.report import (
    Attempt,
    Effective,
    Outcome,
    Result,
    SizingReport,
    Source,
    State,
    Termination,
)
from kvline_operator.api.spec import parse
from kvline_operator.observe.ended_pods import EndedPod
from kvline_operator.observe.pods import Ended, PodView
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report.conditions import conditions
from kvline_operator.report.service_state import Condition, ServiceState
from kvline_operator.store.records import merge
from kvline_operator.store.verdict import GateResult, Phase, Verdict

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


def hybrid_pod(
    tokens: int = 4096,
    slots: int = 256,
    snapshots: int = 64,
    name: str = "chat-aaaaa-1",
    **more: Any,
) -> PodView:
    """Of a model whose layers keep recurrent states, each as large as 8 KV tokens."""
    plain = ready_pod(tokens, name)
    assert plain.report is not None and plain.report.result is not None
    has = {"state_slots": slots, "snapshots": snapshots, "slot_bytes": 8 * 512, **more}
    result = replace(plain.report.result, **has)
    return replace(plain, report=replace(plain.report, result=result))


ENCODER = {TOWER: 1120, ENCODER_WORK: 300, ENCODER_CACHE: 512}  # MiB


def image_pod(tokens: int = 4096, name: str = "chat-aaaaa-1") -> PodView:
    """Of a model with an encoder of images, of 8 a request and 16,384 patches each."""
    plain = ready_pod(tokens, name)
    assert plain.report is not None and plain.report.result is not None
    assert plain.report.effective is not None
    parts = (Part("weights", 50), *(Part(*each) for each in ENCODER.items()), Part("others", 18))
    effective = replace(plain.report.effective, max_images_per_request=8, max_image_patches=16384)
    result = replace(plain.report.result, ranks=(Memory(2000, parts),))
    return replace(plain, report=replace(plain.report, effective=effective, result=result))


def recorded() -> dict[str, Record]:
    """The record that ready_pod() leaves."""
    return merge({}, [report(State.VALIDATED)])


def service_state(*pods: PodView, spec: dict[str, Any] | None = None, **more: Any) -> ServiceState:
    body = {**BODY, "spec": {**BODY["spec"], **(spec or {})}}
    more.setdefault("plan", RolloutPlan({"aaaaa": 1}, "aaaaa"))
    more.setdefault("phases", {more["plan"].stable: Phase.ACCEPTED})
    spec_ = parse(body)
    more.setdefault("limits", Thresholds.minimums(spec_.min_kv_tokens, spec_.min_sequences))
    return ServiceState(spec_, pods=pods, **more)


def by_type(made: ServiceState) -> dict[str, Condition]:
    return {c.type: c for c in conditions(made)}


def ended(code: int, reason: str = "Error", message: str = "why") -> Ended:
    termination = Termination(1, code, "name", message)
    return Ended(code, reason, termination, message)


HELD = Verdict(GateResult.HELD, "b: Probing")


STUCK = Verdict(GateResult.HELD, "b has no node", blocked=True)


FAILED = Verdict(
    GateResult.REJECTED, "measured 9 KV tokens, 950 are required: 941 short", 9, 950, 1000
)


PASSED = Verdict(GateResult.PASSED, "measured 990 KV tokens, 950 are required", 990, 950, 1000)


GPU = {"resources": {"memory": "16Gi", "gpus": 1}}


LOST = EndedPod("p1", "u", "aaaaa", "n1", "t2", "UnexpectedAdmissionError", "no healthy devices")
