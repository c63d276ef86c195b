"""`kubectl kvline check`: the answers before a manifest is applied."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from services import BODY

from kvline_contract.launch import Images
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.names import KIND
from kvline_contract.report import Provenance, Source
from kvline_kubectl.__main__ import checking, parser
from kvline_kubectl.check import EXIT_CODES, Answer, Result, applied, check
from kvline_kubectl.cluster import Cluster
from kvline_operator.answers import Answer as Refusal
from kvline_operator.answers import Cause
from kvline_operator.api.revision_hash import revision_hash
from kvline_operator.api.spec import canonical, parse
from kvline_operator.errors import Invalid
from kvline_operator.observe.slots import Slots
from kvline_operator.plan.forecast import ROUNDING
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.capacity_status import CapacityStatus, Spread
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import GateResult, Sequences, StoredVerdict

TOKENS, EACH = 20480, 46080
IMAGE = "localhost/server@sha256:" + "a" * 64
MEMORY = MemoryV1(2048, 513, 86, 0, 900, 59, 490)
ENGINE = {"maxRunningRequests": 16, "maxPrefillTokens": 512}
SERVED = CapacityStatus(
    kv_tokens=TOKENS,
    kv_tokens_total=TOKENS,
    spread=Spread(TOKENS, TOKENS),
    bytes_per_token=EACH,
    memory=MEMORY,
    attempts=1,
    measured_at="t",
    source=Source.MEASURED,
    fingerprint="f",
    cache_dtype="float32",
)
STABLE = RevisionState(accepted=2, bytes_per_token=EACH, baseline={"": TOKENS}, capacity=SERVED)
Object = dict[str, Any]


def service(**spec: Any) -> Object:
    body = copy.deepcopy(BODY)
    body["spec"] = {
        "model": {"source": "pvc://models/smollm2"},
        "resources": {"memory": "2Gi"},
        "engine": ENGINE,
        **spec,
    }
    return body


def revision(body: Object, state: RevisionState, number: int = 1) -> RevisionEntry:
    """As the operator's ControllerRevision of this service."""
    inputs = parse(body).inputs
    name = revision_hash(canonical(inputs), IMAGE)
    return RevisionEntry(name, number, IMAGE, "", inputs, state)


def asked(
    new: Object, *others: RevisionEntry, stable: RevisionState = STABLE, **more: Any
) -> Answer:
    return check(new, (*others, revision(service(), stable)), more.get("outdated", False))


def test_without_a_change_of_pods_nothing_is_measured() -> None:
    same = asked(service(replicas=3, rollout={"strategy": "Replace"}))
    assert same.result is Result.PASSES and "no new revision" in same.message
    assert asked(service(restartedAt="2026-01-01T00:00:00Z")).result is Result.PASSES
    high = asked(service(capacity={"minKVTokens": 30000}))
    assert high.result is Result.REJECTED and "30000 is more than the 20480" in high.message


@pytest.mark.parametrize(
    ("memory", "result", "words"),
    [
        ("3Gi", Result.PASSES, "arithmetic from the 20,480"),
        ("1536Mi", Result.REJECTED, "19,456 are required (95 % of the baseline 20480 on a CPU)"),
        ("2000Mi", Result.UNKNOWN, "19,456 are required"),
    ],
)
def test_arithmetic_decides_what_it_can(memory: str, result: Result, words: str) -> None:
    answer = asked(service(resources={"memory": memory}))
    assert answer.result is result and words in answer.message
    assert answer.required == 19456 and answer.low is not None and answer.high is not None
    assert (answer.low > TOKENS) == (memory == "3Gi")


def test_what_arithmetic_cannot_tell_must_be_measured() -> None:
    answer = asked(service(engine={**ENGINE, "maxModelLen": 4096}))
    assert (answer.result, answer.low) == (Result.UNKNOWN, None)
    assert asked(service(image="localhost/other@sha256:" + "b" * 64)).result is Result.UNKNOWN
    latest = asked(service(upgradePolicy="Latest"), outdated=True)
    assert latest.result is Result.UNKNOWN
    assert asked(service(upgradePolicy="Latest")).result is Result.PASSES  # it is that already
    bare = replace(STABLE, capacity=None)
    assert asked(service(resources={"memory": "3Gi"}), stable=bare).result is Result.UNKNOWN
    first = asked(service(), stable=RevisionState())
    assert first.result is Result.UNKNOWN and "no revision of it serves yet" in first.message


OTHER = service(resources={"memory": "1900Mi"})


def verdict(result: GateResult, against: int, measured: int) -> StoredVerdict:
    return StoredVerdict(result, against, measured, 19456, TOKENS, f"measured {measured}")


def test_a_verdict_beside_the_revision_that_serves_is_the_answer() -> None:
    failed = RevisionState(verdict=verdict(GateResult.REJECTED, 2, 18000))
    answer = asked(OTHER, revision(OTHER, failed, 2))
    assert (answer.result, answer.low, answer.required) == (Result.REJECTED, 18000, 19456)
    assert "is decided: measured 18000" in answer.message
    passed = RevisionState(verdict=verdict(GateResult.PASSED, 2, 19500))
    assert asked(OTHER, revision(OTHER, passed, 2)).result is Result.PASSES
    policy = parse(OTHER).policy
    late = RevisionState(expiry=Expiry(2, "b has no node", policy))
    answer = asked(OTHER, revision(OTHER, late, 2))
    assert answer.result is Result.REJECTED and "b has no node" in answer.message


@pytest.mark.parametrize(
    ("tokens", "result"),
    [(25000, Result.PASSES), (12000, Result.REJECTED), (19500, Result.UNKNOWN)],
)
def test_what_an_equal_revision_measured_before_decides_beyond_its_noise(
    tokens: int, result: Result
) -> None:
    """A rejection that is history is measured again, so its figure is an expectation."""
    past = RevisionState(verdict=verdict(GateResult.REJECTED, 0, tokens))
    answer = asked(OTHER, revision(OTHER, past, 2))
    assert answer.result is result and (answer.low, answer.high) == (tokens, tokens)
    assert "which an equal revision measured on a CPU" in answer.message
    served = RevisionState(accepted=1, capacity=replace(SERVED, kv_tokens=tokens))
    assert asked(OTHER, revision(OTHER, served, 2)).result is result


def test_a_held_revision_s_figure_counts_and_a_pause_is_named() -> None:
    held = RevisionState(seen_tokens=12000)
    new = copy.deepcopy(OTHER)
    new["spec"]["rollout"] = {"paused": True}
    answer = asked(new, revision(OTHER, held, 2))
    assert (answer.result, answer.low) == (Result.REJECTED, 12000)
    assert answer.message.endswith("spec.rollout.paused holds it back")


def test_a_mixed_pool_s_figure_counts_where_its_gpu_is_known() -> None:
    mixed = replace(STABLE, baseline={"H100": TOKENS, "L4": 9000})
    past = RevisionState(verdict=verdict(GateResult.REJECTED, 0, 25000))
    new = service(model={"source": "pvc://models/smollm2", "servedName": "other"})
    assert asked(new, revision(new, past, 2), stable=mixed).result is Result.UNKNOWN
    on = replace(SERVED, kv_tokens=12000, provenance=Provenance("L4", "", "", "", {}))
    served = RevisionState(accepted=1, capacity=on)
    answer = asked(new, revision(new, served, 2), stable=mixed)
    assert answer.result is Result.PASSES and "baseline 9000 on L4" in answer.message


def test_what_cannot_be_compared_is_held_until_the_spec_has_a_minimum() -> None:
    new = service(engine={**ENGINE, "kvCacheDtype": "fp8"})
    answer = asked(new)
    assert answer.result is Result.HELD and "set spec.capacity.minKVTokens" in answer.message
    new["spec"]["capacity"] = {"minKVTokens": 16000}
    assert asked(new).result is Result.UNKNOWN
    new["spec"]["capacity"] = {"minKVTokens": 10**6}
    assert asked(new).result is Result.REJECTED  # four times as many at most
    assert asked(service(model={"source": "pvc://models/other"})).result is Result.HELD


def test_states_in_bfloat16_are_held_until_the_spec_has_a_minimum() -> None:
    """At half of their bytes they leave more KV tokens, never fewer: 5 for each of 81 slots, beside
    what pages round."""
    before = hybrid(16)
    assert before.capacity is not None
    capacity = replace(before.capacity, bfloat16_slot_bytes=5 * EACH)
    asked_now = {**ENGINE, "prefixSnapshots": 64}
    served = revision(service(engine=asked_now), replace(before, capacity=capacity))
    new = service(engine={**asked_now, "stateDtype": "bfloat16"})
    answer = check(new, (served,), False)
    assert answer.result is Result.HELD and "spec.engine.stateDtype is bfloat16" in answer.message
    for least, result in ((16_000, Result.PASSES), (10**6, Result.REJECTED)):
        new["spec"]["capacity"] = {"minKVTokens": least}
        answer = check(new, (served,), False)
        assert answer.result is result
        assert answer.low == TOKENS and answer.high is not None
        assert 81 * 5 <= answer.high - TOKENS <= 81 * 5 + ROUNDING


def test_a_pin_below_the_threshold_is_rejected() -> None:
    low = asked(service(capacity={"kvTokens": 16000}))
    assert low.result is Result.REJECTED and (low.low, low.high) == (16000, 16000)


def test_a_spec_that_the_operator_does_not_accept_is_rejected_with_its_field() -> None:
    answer = asked(service(engine={"kvCacheDtype": "fp4"}))
    assert answer.result is Result.REJECTED and "spec.engine.kvCacheDtype" in answer.message
    for wrong, why in (
        ({"method": "Draft"}, "spec.engine.speculation.method: expected one of NGram"),
        ({"method": "NGram", "maxDraftTokens": 8}, "maxDraftTokens: expected 1 to 7, got 8"),
        ({"method": "NGram", "newer": 1}, "spec.engine.speculation.newer: unknown field"),
        ({}, "spec.engine.speculation.method: missing"),
        ("NGram", "spec.engine.speculation: expected an object"),
    ):
        answer = asked(service(engine={"speculation": wrong}))
        assert answer.result is Result.REJECTED and why in answer.message


CEL = "spec.resources.cpuLimit: Invalid value: must be at least spec.resources.cpu"


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_spec_that_the_api_server_does_not_accept_is_rejected_with_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Also one without any spec."""
    (file := tmp_path / "chat.json").write_text(json.dumps({**BODY, "kind": KIND, "spec": None}))
    cluster = Cluster(cast(Any, SimpleNamespace(validate=_refuses)), "ns")
    code = checking(cluster, parser().parse_args(["check", "-f", str(file), "-o", form]))
    shown, errors = capsys.readouterr()
    assert (code, errors) == (EXIT_CODES[Result.REJECTED], "")
    lines = [f"{file}: {CEL}", f"{file}: spec.model: Required value"]
    if form == "json":
        assert json.loads(shown) == {"result": "Rejected", "message": "\n".join(lines)}
    else:
        assert shown.splitlines() == ["Rejected", *lines]


def _refuses(body: Object) -> None:
    field, _, text = CEL.partition(": ")
    causes = Cause("", field, text), Cause("", "spec.model", "Required value")
    raise Invalid("refused", answer=Refusal(422, "Invalid", "refused", causes=causes))


def test_what_the_plugin_wrote_stays_when_a_manifest_is_applied() -> None:
    live = service(upgradePolicy="Latest", rollout={"paused": True, "strategy": "Replace"})
    new = {"metadata": {"name": "chat", "namespace": "ns", "uid": ""}, "spec": service()["spec"]}
    made = applied(new, live)
    assert made["spec"]["upgradePolicy"] == "Latest" and made["metadata"]["uid"] == "u"
    assert made["spec"]["rollout"] == {"paused": True}  # the rest is the manifest's own
    new["spec"]["upgradePolicy"] = "Pinned"
    assert applied(new, live)["spec"]["upgradePolicy"] == "Pinned"


def test_exit_codes_are_none_of_an_error_s() -> None:
    assert EXIT_CODES[Result.PASSES] == 0
    assert not {1, 2} & set(EXIT_CODES.values()) and set(EXIT_CODES) == set(Result)


def hybrid(running: int = 256, snapshots: int = 64) -> RevisionState:
    """Of a model whose layers keep recurrent states, each as large as 10 tokens."""
    slots = Slots(running, snapshots, 10 * EACH)
    has = replace(SERVED, sequences=running, snapshots=snapshots, slot_bytes=10 * EACH)
    return replace(STABLE, slots={"": slots}, capacity=has)


def test_a_change_of_slots_is_answered_with_what_it_trades() -> None:
    asked_now = {**ENGINE, "prefixSnapshots": 64}
    before = revision(service(engine=asked_now), hybrid(16))

    def to(**spec: Any) -> Answer:
        return check(service(**spec), (before,), False)

    fewer = to(engine={**asked_now, "prefixSnapshots": 0})
    assert fewer.result is Result.PASSES and fewer.low is not None
    assert abs(fewer.low - TOKENS - 640) < 64
    assert "16 sequences, 16 are required (95 % of the baseline 16 on a CPU)" in fewer.message
    assert "-64 snapshots leave 640 more KV tokens" in fewer.message
    assert (fewer.sequences, fewer.required_sequences) == (16, 16)
    more = to(engine={**asked_now, "maxRunningRequests": 64})
    assert more.result is Result.UNKNOWN and more.required == 19_000
    assert more.message.endswith(
        "64 sequences, none are required, as the spec changed maxRunningRequests; +48 requests "
        "cost 480 KV tokens"
    )
    less = {**asked_now, "maxRunningRequests": 8}
    few = to(engine=less, capacity={"minSequences": 9})
    assert few.result is Result.REJECTED, "whatever its KV tokens are"
    assert "9 are required (spec.capacity.minSequences)" in few.message
    assert to(engine=less).result is Result.PASSES


def test_a_change_of_modalities_is_answered_by_what_the_encoder_takes() -> None:
    """Exactly where it goes, and not before a measurement where it comes. An absent field is what
    the stable revision has."""
    parts = (*MEMORY.upgraded().parts[:-1], Part("tower", 100), Part("others", 390))
    capacity = replace(SERVED, memory=MemoryV1.of(Memory(2048, parts)))
    sees = replace(
        revision(service(), replace(STABLE, capacity=capacity)), images=str(Images.IF_SERVED)
    )
    text, both = ({**ENGINE, "modalities": kinds} for kinds in (["text"], ["text", "image"]))
    answer = check(service(engine=text), (sees,), False)
    assert answer.result is Result.PASSES and answer.low is not None
    assert 0 <= TOKENS + 100 * (1 << 20) / EACH - answer.low < (1 << 20) / EACH + 64
    assert check(service(), (sees,), False).message.startswith("no new revision")
    assert asked(service(engine=text)).message.startswith("no new revision")
    for known in (sees, replace(sees, images=str(Images.REQUIRED))):
        assert check(service(engine=both), (known,), False).message.startswith("no new revision")
    answer = asked(service(engine={**ENGINE, "maxImagePatches": 64}))
    assert answer.result is Result.REJECTED and "serves text alone" in answer.message


def test_images_that_are_turned_on_are_not_answered_by_silence() -> None:
    """They do not start where the same pods were to serve them and served text: on a GPU today, or
    of a model without an encoder. Beside another change, or of text that was asked for, a start
    tells."""
    both = {**ENGINE, "modalities": ["text", "image"]}
    tried = replace(revision(service(), STABLE), images=str(Images.IF_SERVED))
    for more in ({}, {"maxImagePatches": 64}):
        answer = check(service(engine={**both, **more}), (tried,), False)
        assert (answer.result, answer.low, answer.high) == (Result.HELD, None, None)
        assert (
            "it would not start with image in spec.engine.modalities: revision " in answer.message
        )
    asked_text = revision(service(engine={**ENGINE, "modalities": ["text"]}), STABLE)
    new_model = {"model": {"source": "pvc://models/sees"}, "capacity": {"minKVTokens": 1000}}
    for before, new in (
        (asked_text, service(engine=both)),
        (tried, service(engine=both, **new_model)),
        (tried, service(engine=both, image="registry.example/next@sha256:" + "1" * 64)),
        (tried, service(engine=both, capacity={"kvTokens": TOKENS})),
    ):
        answer = check(new, (before,), False)
        assert answer.result is Result.UNKNOWN
        assert "whether its model has an encoder of images that its server runs" in answer.message
    for new in (service(engine={**ENGINE, "modalities": ["text"]}), service()):
        assert "image" not in check(new, (tried,), False).message
    longer = check(service(engine={**ENGINE, "maxTopLogprobs": 1}), (tried,), False)
    assert "image" not in longer.message, "an absent field is text alone, as it was measured"


@pytest.mark.parametrize(
    "engine", [{"prefixSnapshots": 32}, {"maxPrefillTokens": 1024}, {"maxRunningRequests": None}]
)
def test_no_sequences_are_promised_where_the_server_chooses_them_anew(engine: Object) -> None:
    """Fewer snapshots leave room for more requests, which take more than these left."""
    unset = {"maxPrefillTokens": 512, "prefixSnapshots": 64}
    if "maxRunningRequests" in engine:
        unset["maxRunningRequests"] = 16
    now = {key: value for key, value in {**unset, **engine}.items() if value is not None}
    new = service(engine=now)
    before = revision(service(engine=unset), hybrid(16))
    answer = check(new, (before,), False)
    assert (answer.result, answer.low, answer.sequences) == (Result.UNKNOWN, None, None)
    past = replace(verdict(GateResult.REJECTED, 0, 25_000), sequences=Sequences(12, 16, 16))
    measured = RevisionState(verdict=past)
    answer = check(new, (revision(new, measured, 2), before), False)
    assert (answer.low, answer.sequences) == (25_000, 12), "as an equal revision has measured"
    held = RevisionState(seen_tokens=25_000)
    answer = check(new, (revision(new, held, 2), before), False)
    assert (answer.result, answer.low, answer.sequences) == (Result.UNKNOWN, 25_000, None)
    assert "how many sequences must be measured" in answer.message


def test_a_minimum_of_sequences_is_compared_with_what_serves() -> None:
    before = revision(service(), hybrid(16))
    for least, result in ((16, Result.PASSES), (17, Result.REJECTED)):
        answer = check(service(capacity={"minSequences": least}), (before,), False)
        assert answer.result is result and answer.required_sequences == least
    assert "minSequences 17 is more than the 16 sequences of a replica" in answer.message
    plain = asked(service(capacity={"minSequences": 17}))
    assert plain.result is Result.PASSES and plain.sequences is None
