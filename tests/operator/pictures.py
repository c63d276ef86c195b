"""A status cache with one service in each state, for the tests of the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_contract.codec import encode
from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    Attempt,
    Current,
    Effective,
    Outcome,
    Result,
    SizingReport,
    Source,
    Stage,
    State,
)
from kvline_operator.api.key import Key
from kvline_operator.observe.pods import view
from kvline_operator.observe.reports import Reading
from kvline_operator.report.status_cache import RevisionEntry, StatusCache, View
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult, Phase, StoredVerdict

MEMORY = MemoryV1(2048, 513, 104, 0, 861, 128, 442)
ESTIMATES = [
    {"field": "spec.resources.memory", "value": "3Gi", "kvTokens": 39712, "bound": "AtLeast"},
    {"field": "spec.engine.kvCacheDtype", "value": "fp8", "kvTokens": 76400, "bound": "AtMost"},
    {
        "field": "spec.engine.maxRunningRequests",
        "value": "8",
        "kvTokens": 20550,
        "bound": "AtMost",
    },
]
INPUTS = {"model": {"source": "pvc://models/smollm2"}, "resources": {"memory": "2Gi"}}
LOSS = "measured 8528 KV tokens, 18408 are required (95 % of 19376): 9880 short"
# At 12:00, 20 s after the stage began.
DETAILS = {
    "stress": "6 steps, the longest prefill-many 1310 ms",
    "validate": "6 steps, the longest last-chunk 1720 ms",
}
VALIDATES = "validates 8528 tokens with the largest steps"
CURRENT = Current(4, 4, VALIDATES, "2026-11-22T11:59:40Z", 2, 6, "decode", "2026-11-22T12:00:30Z")


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def report(state: State, tokens: int) -> SizingReport:
    done = state is State.VALIDATED
    result = Result(
        tokens,
        46080,
        Source.MEASURED,
        "f" * 32,
        1500,
        16000,
        0,
        "2026-11-22T00:00:00Z",
        (MEMORY.upgraded(),),
    )
    names = (("load", 1300), ("probe", 300), ("stress", 4300), ("map", 600), ("validate", 5200))
    return SizingReport(
        "u",
        "p",
        "r",
        1,
        state,
        "t",
        "t",
        Effective(8192, 16, 512, 20, 128, 16, 64),
        tuple(Stage(name, ms, 0, DETAILS.get(name)) for name, ms in names),
        (Attempt(1, tokens, Outcome.SURVIVED if done else Outcome.RUNNING, None),),
        result if done else None,
        current=None if done else CURRENT,
    )


def pod(name: str, revision: str, state: State, tokens: int) -> Any:
    status = {
        "metadata": {"name": name, "uid": name, "labels": {"kvline.dev/revision": revision}},
        "spec": {"nodeName": "node-1"},
    }
    seen = view(status, Reading(report(state, tokens)))
    return replace(seen, ready=state is State.VALIDATED, running=True)


def rolled_back(name: str = "smollm2", message: str = LOSS) -> View:
    """A service that serves and whose newest spec was rejected."""
    gate = {"revision": "dt8h5", "result": "Rejected", "message": message}
    status = {
        "replicas": 3,
        "readyReplicas": 2,
        "url": f"http://{name}.team.svc:8000/v1",
        "capacity": {
            "kvTokens": 19376,
            "kvTokensTotal": 38960,
            "spread": {"min": 19376, "max": 19584},
            "fullLengthSequences": 2,
            "bytesPerToken": 46080,
            "tokensPerGiB": 23301,
            "estimates": ESTIMATES,
            "attempts": 1,
            "measuredAt": "2026-11-22T00:00:00Z",
            "source": "Measured",
            "memory": encode(MEMORY),
        },
        "rollout": {
            "stableRevision": "9xqtt",
            "rejectedRevision": "dt8h5",
            "gate": {**gate, "measured": 8528, "required": 18408, "baseline": 19376},
        },
        "conditions": [
            condition("Accepted", "True", "Valid", "the spec can be acted on"),
            condition("UpToDate", "False", "RevisionRejected", f"9xqtt serves: {message}"),
            condition("Ready", "True", "Serving", "2 replicas serve 38960 KV tokens"),
        ],
    }
    pods = (
        pod(f"{name}-9xqtt-a", "9xqtt", State.VALIDATED, 19584),
        pod(f"{name}-9xqtt-b", "9xqtt", State.VALIDATED, 19376),
        pod(f"{name}-dt8h5-c", "dt8h5", State.VALIDATING, 8528),
    )
    less = {**INPUTS, "resources": {"memory": "1536Mi"}}
    verdict = StoredVerdict(GateResult.REJECTED, 1, 8528, 18408)
    failed = RevisionState(verdict=verdict)
    first = RevisionState(accepted=1, baseline={"": 19376})
    history = (
        RevisionEntry("dt8h5", 2, "image:1", "2026-11-22T00:40:00Z", less, failed, Phase.REJECTED),
        RevisionEntry("9xqtt", 1, "image:1", "2026-11-21T10:00:00Z", INPUTS, first, Phase.ACCEPTED),
    )
    spec = {"model": {"source": "pvc://models/smollm2"}, "replicas": 2}
    return View(Key("team", name), spec, status, pods, history)


def of_two_ranks() -> View:
    """A service whose second GPU has a neighbour."""
    view = rolled_back()
    ranks = []
    for number, others in enumerate((48, 308)):
        mib = {"weights": 900, "kv-cache": 800, "headroom": 348 - others, "others": others}
        parts = [{"name": name, "mib": size} for name, size in mib.items()]
        ranks.append({"rank": number, "gpu": number, "totalMiB": 2048, "parts": parts})
    capacity = {**view.status["capacity"], "ranks": ranks, "bindingRank": 1}
    return replace(view, status={**view.status, "capacity": capacity})


def simple(name: str, state: str, reason: str) -> View:
    ready = condition("Ready", state, reason)
    return View(Key("research", name), {"replicas": 1}, {"conditions": [ready]})


def board() -> StatusCache:
    made = StatusCache()
    made.put(rolled_back())
    made.put(simple("new", "False", "Stressing"))
    made.put(simple("too-much", "False", "BelowMinimum"))
    made.put(View(Key("research", "unseen"), {}, {}))
    return made
