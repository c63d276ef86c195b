"""A revision's state in its ControllerRevision: written, read back, edited by others, and as
operators before the document left it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.exits import ExitCode
from kvline_contract.memory import MemoryV1
from kvline_contract.names import ANNOTATION_STATE
from kvline_contract.report import Source, Termination
from kvline_operator.errors import NewerState
from kvline_operator.plan.phase import Policy, phase
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus, Spread
from kvline_operator.store.container_ends import Ends
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import GateResult, Phase, StoredVerdict

# As the operator of commit 7fc0ac7 wrote them.
EARLIER = json.loads((Path(__file__).parent / "earlier" / "states.json").read_text())
UID = "0b0e2b2c-0f2f-4a4c-8f5e-1f6c3c1f0a11"
LONG = "measured 19376 KV tokens, 18408 are required (95 % of the baseline 19376 on a CPU)"
OVERDUE = "not ready within spec.rollout.progressDeadlineSeconds (1800): chat-b-1 has no node"
SERVED = CapacityStatus(
    kv_tokens=19376,
    kv_tokens_total=0,
    spread=Spread(19376, 19376),
    bytes_per_token=46080,
    memory=MemoryV1(2048, 300, 200, 0, 1200, 300, 48),
    attempts=1,
    measured_at="2026-11-20T10:00:00Z",
    source=Source.MEASURED,
    fingerprint="f" * 32,
    full_length_sequences=9,
)


def rejected(message: str, *figures: int, against: int = 3) -> RevisionState:
    measured, required, baseline = figures or (0, 0, 0)
    verdict = StoredVerdict(GateResult.REJECTED, against, measured, required, baseline, message)
    return RevisionState(verdict=verdict)


FAILED = rejected("chat-b-1 ended 2 times, with code 40 (OutOfMemory): the weights do not fit")
STATES = {
    "new": (RevisionState(), Phase.NEW),
    "first": (
        RevisionState(
            accepted=1,
            bytes_per_token=46080,
            baseline={"": 19376},
            capacity=replace(SERVED, as_of="2026-11-21T10:00:00Z"),
        ),
        Phase.NEW,  # another one was accepted since
    ),
    "accepted": (
        RevisionState(
            accepted=3,
            verdict=StoredVerdict(GateResult.PASSED, 2, 19376, 18408, 19376, LONG),
            bytes_per_token=46080,
            baseline={"": 19376, "NVIDIA H200": 812345},
            capacity=SERVED,
        ),
        Phase.ACCEPTED,
    ),
    "promoted": (
        RevisionState(
            accepted=4,
            verdict=StoredVerdict(
                GateResult.PASSED,
                3,
                8528,
                message="promoted by hand: measured against spec.capacity.minKVTokens alone",
                promoted=True,
            ),
            bytes_per_token=46080,
            baseline={"": 8528},
        ),
        Phase.PASSED,  # beside the one that it replaced
    ),
    "passed": (
        RevisionState(verdict=StoredVerdict(GateResult.PASSED, 3, 19000, 18408, 19376, "enough")),
        Phase.PASSED,
    ),
    "rejected": (
        rejected("measured 8528 KV tokens, 18408 are required: 9880 short", 8528, 18408, 19376),
        Phase.REJECTED,
    ),
    "failed": (replace(FAILED, ends={UID: Ends((1, 2), (3,))}), Phase.REJECTED),
    "historical": (rejected("short", 8528, 18408, 19376, against=0), Phase.NEW),
    "measuring": (
        RevisionState(missing_since="2026-11-20T10:00:00Z", ends={UID: Ends((1,))}),
        Phase.NEW,  # which it is until its pods are seen
    ),
    "expired": (
        RevisionState(
            expiry=Expiry(
                3,
                OVERDUE,
                "0123456789abcdef",
            )
        ),
        Phase.EXPIRED,
    ),
}
POLICY = Policy(Thresholds(0, 95), "0123456789abcdef")


def kept(annotations: dict[str, str]) -> RevisionState:
    return revision_state.read({"metadata": {"name": "chat-b", "annotations": annotations}})


@pytest.mark.parametrize("name", EARLIER)
def test_what_an_earlier_operator_kept_becomes_the_document(name: str) -> None:
    """With its phase beside the third accepted revision. The next write has the document alone."""
    expected, shown = STATES[name]
    found = kept(EARLIER[name])
    if name == "failed":
        assert found.verdict is not None and found.verdict.diagnosis is not None
        diagnosis = found.verdict.diagnosis
        assert (diagnosis.name, diagnosis.knobs[0].value) == ("OutOfMemory", 4096)
        found = replace(found, verdict=replace(found.verdict, diagnosis=None))
    assert found == expected
    assert phase(found, STATES["accepted"][0], POLICY) is shown
    stored = {"metadata": {"annotations": EARLIER[name]}}
    assert not revision_state.is_stored(found, stored)
    assert set(revision_state.to_annotations(found)) == {ANNOTATION_STATE}


numbers = st.integers(0, 10**12)
texts = st.text(max_size=40)


@given(
    st.builds(
        RevisionState,
        version=st.just(1),
        accepted=numbers,
        verdict=st.none()
        | st.builds(
            StoredVerdict,
            st.sampled_from(GateResult),
            numbers,
            numbers,
            numbers,
            numbers,
            texts,
            st.booleans(),
            st.none() | st.just(Termination.of(ExitCode.OUT_OF_MEMORY, "why")),
        ),
        bytes_per_token=numbers,
        baseline=st.dictionaries(st.text(max_size=128), st.integers(1, 10**12), max_size=9),
        missing_since=st.text(max_size=32),
        expiry=st.none() | st.builds(Expiry, st.integers(1, 9), texts, st.text(max_size=64)),
        capacity=st.sampled_from([None, SERVED]),
        ends=st.dictionaries(
            st.text(max_size=36), st.builds(Ends, st.tuples(st.integers(1, 99))), max_size=32
        ),
    )
)
def test_what_was_written_is_read(state: RevisionState) -> None:
    annotations = revision_state.to_annotations(state)
    assert kept(annotations) == state
    turned = replace(
        state,
        baseline=dict(reversed(state.baseline.items())),
        ends=dict(reversed(state.ends.items())),
    )
    assert revision_state.is_stored(turned, {"metadata": {"annotations": annotations}})


@pytest.mark.fault("F72", shows="an unreadable document counts as absent and is in the log")
@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version":0}', '{"accepted":3}', '{"version":1,"accepted":-1}', "\ud800"],
)
def test_an_unreadable_document_counts_as_absent_and_is_logged(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is replaced by the next write, and what an operator left before it counts no more."""
    annotations = {**EARLIER["accepted"], ANNOTATION_STATE: text}
    if not text:
        assert kept(annotations).accepted == 3, "removed by hand"
        return
    assert kept(annotations) == RevisionState()
    assert "ControllerRevision chat-b is measured anew" in caplog.text
    assert not revision_state.is_stored(RevisionState(), {"metadata": {"annotations": annotations}})


def test_what_a_newer_operator_keeps_is_not_written_over() -> None:
    """The reconcile ends before its first write."""
    with pytest.raises(NewerState, match=r"ControllerRevision chat-b: .* version 2, .* up to 1"):
        kept({ANNOTATION_STATE: '{"version":2,"shape":"unknown"}'})


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        ("accepted", "-1"),
        ("measured", "9" * 40),
        ("accepted", str(10**18)),
        ("verdict", "Great"),
        ("baseline", '{"H200": "many", "A100": 7}'),
        ("baseline", "["),
        ("capacity", "{}"),
        ("diagnosis", "{}"),
        ("ends", '{"u": 1}'),
        ("ends", '{"u": [["x"], []]}'),
        ("ends", "[]"),
        ("kills", '{"u": [1, 2]}'),  # of operators that kept ends otherwise
        ("expired", "soon"),
    ],
)
def test_of_an_earlier_operator_s_annotations_each_unreadable_one_is_dropped(
    annotation: str, text: str
) -> None:
    expected = {"A100": 7} if text.startswith('{"H200"') else {}
    assert kept({f"kvline.dev/{annotation}": text}) == RevisionState(baseline=expected)
