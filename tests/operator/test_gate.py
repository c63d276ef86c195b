"""The gate's results as a table: what passes, is held or is rejected, with figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import ENCODER, image_pod, ready_pod
from test_state_document import STATES

from kvline_contract.codec import dumps
from kvline_contract.launch import GateFile, KVCacheDtype, StateDtype
from kvline_operator.observe.pods import Measured
from kvline_operator.plan.acceptance import baseline_of, comparison_group
from kvline_operator.plan.gate import (
    Baseline,
    Candidate,
    ComparisonGroup,
    evaluate,
    incomparable,
    thresholds,
)
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult

GROUP = ComparisonGroup("hf://org/model", 1)
BASELINE = Baseline(GROUP, 100, {"H200": 1000, "": 500})
PLAIN = Candidate(GROUP, (Measured("H200", 960, 100),))
FP8 = replace(PLAIN, group=replace(GROUP, kv_cache_dtype=KVCacheDtype.FP8))
SMALL_STATES = Candidate(
    replace(GROUP, state_dtype=StateDtype.BFLOAT16), (Measured("H200", 1990, 100),)
)


def test_one_dtype_read_from_two_revisions_can_be_compared() -> None:
    text = '{"model": {"source": "pvc://a/b"}, "resources": {}, "engine": {"kvCacheDtype": "fp8"}}'
    one, other = (comparison_group(json.loads(text)) for _ in range(2))
    candidate = Candidate(one, (Measured("H200", 960, 100),))
    assert incomparable(candidate, Baseline(other, 100, {})) == ""


def test_an_upgrade_that_starts_to_free_windows_is_compared_with_one_that_kept_all() -> None:
    """As the operator of commit 7fc0ac7 has stored the one, whose server kept a token in every
    layer."""
    state = STATES["accepted"][0]
    pod = ready_pod(40_000)
    assert pod.result is not None and pod.report is not None
    freed = replace(pod.result, bytes_per_token=7680, full_bytes_per_token=state.bytes_per_token)
    assert freed.compared_bytes == 46080 and pod.result.compared_bytes == 512
    view = replace(pod, report=replace(pod.report, result=freed))
    assert view.measured is not None
    text = '{"model": {"source": "pvc://a/b"}, "resources": {}}'
    baseline = baseline_of(state, json.loads(text))
    candidate = Candidate(comparison_group(json.loads(text)), (view.measured,))
    verdict = evaluate(candidate, baseline, Thresholds(0, 95))
    assert incomparable(candidate, baseline) == "" and verdict.result is GateResult.PASSED
    less = replace(candidate, replicas=(replace(view.measured, tokens=18_000),))
    assert evaluate(less, baseline, Thresholds(0, 95)).result is GateResult.REJECTED


@pytest.mark.parametrize(
    ("what", "candidate", "minimum", "result", "required", "text"),
    [
        (
            "95 % and more",
            PLAIN,
            0,
            GateResult.PASSED,
            950,
            "950 are required (95 % of the baseline 1000 on H200)",
        ),
        (
            "a token less than required",
            replace(PLAIN, replicas=(Measured("H200", 949, 100),)),
            0,
            GateResult.REJECTED,
            950,
            "measured 949 KV tokens, 950 are required (95 % of the baseline 1000 on H200): 1 short",
        ),
        ("the minimum asks for more", PLAIN, 961, GateResult.REJECTED, 961, "1 short"),
        (
            "the smallest replica counts",
            replace(PLAIN, replicas=(Measured("H200", 999, 100), Measured("H200", 900, 100))),
            0,
            GateResult.REJECTED,
            950,
            "measured 900",
        ),
        (
            "no report is no pass",
            replace(PLAIN, replicas=(), stage="p: Stressing"),
            0,
            GateResult.HELD,
            0,
            "p: Stressing",
        ),
        (
            "no node",
            replace(PLAIN, replicas=(), blocker="p has no node"),
            0,
            GateResult.HELD,
            0,
            "p has no node",
        ),
        (
            "an engine that failed",
            replace(PLAIN, replicas=(), failure="p ended 2 times"),
            0,
            GateResult.REJECTED,
            0,
            "p ended 2 times",
        ),
        (
            "another model without a minimum",
            replace(PLAIN, group=ComparisonGroup("hf://org/other", 1)),
            0,
            GateResult.HELD,
            0,
            "cannot be compared (hf://org/other is another model than hf://org/model)",
        ),
        (
            "another model with one",
            replace(PLAIN, group=ComparisonGroup("hf://org/other", 1)),
            900,
            GateResult.PASSED,
            900,
            "not compared",
        ),
        (
            "more GPUs",
            replace(PLAIN, group=ComparisonGroup(GROUP.model, 2, 2)),
            0,
            GateResult.HELD,
            0,
            "measured 960 KV tokens, which cannot be compared (a replica has 2 GPUs, not 1 GPU): "
            "set spec.capacity.minKVTokens, or promote it by spec.rollout.promote",
        ),
        (
            "more GPUs with a minimum",
            replace(PLAIN, group=ComparisonGroup(GROUP.model, 2, 2)),
            900,
            GateResult.PASSED,
            900,
            "960 KV tokens, 900 are required (spec.capacity.minKVTokens); not compared: a replica",
        ),
        (
            "CPU ranks after a GPU",
            replace(PLAIN, group=ComparisonGroup(GROUP.model, 0, 2)),
            0,
            GateResult.HELD,
            0,
            "a replica has 2 CPU ranks, not 1 GPU",
        ),
        (
            "an fp8 cache without a minimum, whatever it measures",
            replace(FP8, replicas=(Measured("H200", 1990, 50),)),
            0,
            GateResult.HELD,
            0,
            "measured 1990 KV tokens, which cannot be compared (spec.engine.kvCacheDtype is fp8, "
            "not auto: tokens of another size): set spec.capacity.minKVTokens, or promote it by "
            "spec.rollout.promote",
        ),
        (
            "an fp8 cache with a minimum",
            replace(FP8, replicas=(Measured("H200", 940, 50),)),
            940,
            GateResult.PASSED,
            940,
            "940 are required (spec.capacity.minKVTokens); not compared: spec.engine.kvCacheDtype",
        ),
        (
            "an fp8 cache below the minimum",
            replace(FP8, replicas=(Measured("H200", 1990, 50),)),
            1991,
            GateResult.REJECTED,
            1991,
            "1 short; not compared: spec.engine.kvCacheDtype is fp8, not auto",
        ),
        (
            "states in bfloat16 without a minimum, whatever it measures",
            SMALL_STATES,
            0,
            GateResult.HELD,
            0,
            "measured 1990 KV tokens, which cannot be compared (spec.engine.stateDtype is "
            "bfloat16, not float32: recurrent states of another precision): set "
            "spec.capacity.minKVTokens, or promote it by spec.rollout.promote",
        ),
        (
            "states in bfloat16 with a minimum",
            SMALL_STATES,
            1990,
            GateResult.PASSED,
            1990,
            "1990 are required (spec.capacity.minKVTokens); not compared: spec.engine.stateDtype",
        ),
        (
            "a GPU model never seen",
            replace(PLAIN, replicas=(Measured("A100", 9999, 100),)),
            0,
            GateResult.HELD,
            0,
            "nothing has been validated on A100",
        ),
        (
            "smaller tokens",
            replace(PLAIN, replicas=(Measured("H200", 2000, 50),)),
            0,
            GateResult.HELD,
            0,
            "a token takes 50 bytes, not 100",
        ),
        (
            "promoted, though too small",
            replace(PLAIN, replicas=(Measured("H200", 5, 100),), promoted=True),
            0,
            GateResult.PASSED,
            0,
            "promoted by hand",
        ),
        (
            "on a CPU by the CPU's baseline",
            replace(PLAIN, replicas=(Measured("", 480, 100),)),
            0,
            GateResult.PASSED,
            475,
            "95 % of the baseline 500 on a CPU",
        ),
    ],
)
def test_the_table(
    what: str, candidate: Candidate, minimum: int, result: GateResult, required: int, text: str
) -> None:
    verdict = evaluate(candidate, BASELINE, Thresholds(minimum, 95))
    assert (verdict.result, verdict.required) == (result, required), what
    assert text in verdict.message


NONE: dict[str, int] = {}
SMALLER = {**ENCODER, "encoder-work": 100, "encoder-cache": 500}


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (
            NONE,
            ENCODER,
            ": 51 short; images take 1932 MiB more than before (tower 1120, encoder-work 300, "
            "encoder-cache 512): set spec.engine.modalities to [text], or lower "
            "spec.engine.maxImagePatches or maxImagesPerRequest",
        ),
        (
            SMALLER,
            ENCODER,
            "; images take 212 MiB more than before (encoder-work 200, encoder-cache 12): lower "
            "spec.engine.maxImagePatches or maxImagesPerRequest",
        ),
        (ENCODER, SMALLER, ": 51 short"),
        (ENCODER, ENCODER, ": 51 short"),
        (ENCODER, NONE, ": 51 short"),
        (None, ENCODER, ": 51 short"),
    ],
)
def test_a_rejection_names_the_encoder_that_took_the_tokens(
    before: dict[str, int] | None, now: dict[str, int], text: str
) -> None:
    """Where the stable revision has none, or a smaller one; with nothing stored of it neither."""
    baseline = replace(BASELINE, encoder=before)
    replica = Measured("H200", 899, 100, encoder=now)
    verdict = evaluate(replace(PLAIN, replicas=(replica,)), baseline, Thresholds(0, 95))
    assert verdict.result is GateResult.REJECTED and verdict.message.endswith(text)
    enough = replace(PLAIN, replicas=(replace(replica, tokens=960),))
    verdict = evaluate(enough, baseline, Thresholds(0, 95))
    assert verdict.result is GateResult.PASSED and "images" not in verdict.message


def test_what_an_encoder_takes_is_from_reports_of_the_candidate_and_of_what_served() -> None:
    pod = image_pod()
    assert pod.measured is not None and pod.measured.encoder == ENCODER
    plain = ready_pod()
    assert plain.measured is not None and plain.measured.encoder == {}
    inputs = json.loads('{"model": {"source": "pvc://a/b"}, "resources": {}}')
    for served, found in ((pod, ENCODER), (plain, {})):
        state = RevisionState(accepted=1, capacity=CapacityStatus.of([served.report]))
        assert baseline_of(state, inputs).encoder == found
    assert baseline_of(RevisionState(accepted=1), inputs).encoder is None


TWO = Baseline(GROUP, 100, {"H200": 1000, "A100": 500})


REJECTED = "Rejected"


@pytest.mark.parametrize(
    ("what", "sizes", "minimum", "result", "figures", "text"),
    [
        ("each has its own share", {"H200": 960, "A100": 490}, 0, "Passed", (960, 950, 1000), ""),
        (
            "the short one speaks",
            {"H200": 999, "A100": 470},
            0,
            "Rejected",
            (470, 475, 500),
            "on A100",
        ),
        (
            "so does the large one",
            {"H200": 940, "A100": 499},
            0,
            "Rejected",
            (940, 950, 1000),
            "H200",
        ),
        (
            "a minimum for both",
            {"H200": 999, "A100": 499},
            600,
            "Rejected",
            (499, 600, 500),
            "minKV",
        ),
        ("a new model is held", {"H200": 999, "L4": 900}, 0, "Held", (900, 0, 0), "on L4 before"),
        (
            "or has the minimum",
            {"H200": 999, "L4": 900},
            90,
            "Passed",
            (999, 950, 1000),
            "on L4 before",
        ),
        (
            "after what is short",
            {"H200": 900, "L4": 900},
            0,
            "Rejected",
            (900, 950, 1000),
            "50 short",
        ),
    ],
)
def test_replicas_on_several_gpu_models_are_each_compared_with_their_own(
    what: str,
    sizes: dict[str, int],
    minimum: int,
    result: str,
    figures: tuple[int, int, int],
    text: str,
) -> None:
    """The baseline of one GPU model is not compared with replicas on another."""
    replicas = tuple(Measured(gpu, tokens, 100) for gpu, tokens in sizes.items())
    verdict = evaluate(Candidate(GROUP, replicas), TWO, Thresholds(minimum, 95))
    assert verdict.result == result, what
    assert (verdict.measured, verdict.required, verdict.baseline) == figures
    assert text in verdict.message


@given(
    st.dictionaries(st.sampled_from(["H200", "A100", "L4", ""]), st.integers(1, 2000), min_size=1),
    st.dictionaries(st.sampled_from(["H200", "A100", "L4", ""]), st.integers(1, 2000)),
    st.integers(0, 2000),
    st.integers(0, 100),
)
def test_the_gate_file_says_of_each_replica_what_the_verdict_says(
    sizes: dict[str, int], baseline: dict[str, int], minimum: int, percent: int
) -> None:
    """If the gate passes, each replica's gate file admits it; if it rejects, one is kept out."""
    replicas = tuple(Measured(gpu, tokens, 100) for gpu, tokens in sizes.items())
    candidate, policy = Candidate(GROUP, replicas), Thresholds(minimum, percent)
    stable = Baseline(GROUP, 100, baseline)
    verdict = evaluate(candidate, stable, policy)
    gate = thresholds(candidate, stable, policy).gate(verdict.result is GateResult.PASSED)
    let_in = all(r.tokens >= gate.threshold(r.gpu) for r in replicas)
    if verdict.result is GateResult.PASSED:
        assert gate.open and let_in
    if verdict.result is GateResult.REJECTED:
        assert not let_in
    assert GateFile.parse(dumps(gate)) == gate


numbers = st.builds(
    lambda ranks, on_cpu: ComparisonGroup(GROUP.model, 0 if on_cpu else ranks, ranks),
    st.integers(1, 8),
    st.booleans(),
)


@given(numbers, numbers, st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 100))
def test_tokens_are_compared_within_one_number_of_ranks_alone(
    new: ComparisonGroup, old: ComparisonGroup, tokens: int, minimum: int, percent: int
) -> None:
    """Neither the verdict nor the gate file of another number has a share of the baseline."""
    candidate = Candidate(new, (Measured("H200", tokens, 100),))
    stable, policy = Baseline(old, 100, {"H200": 1000}), Thresholds(minimum, percent)
    verdict = evaluate(candidate, stable, policy)
    limits = thresholds(candidate, stable, policy)
    if new == old:
        assert limits.baseline == stable.tokens and "not compared" not in verdict.message
        return
    assert limits == Thresholds(minimum) and verdict.baseline == 0
    assert f"a replica has {new.devices}, not {old.devices}" in verdict.message
    expected = GateResult.PASSED if tokens >= minimum else GateResult.REJECTED
    assert verdict.result is (expected if minimum else GateResult.HELD)


def test_servers_that_know_no_map_take_the_smallest_and_a_long_name_is_left_out() -> None:
    gate = Thresholds(0, 95, {"H200": 1000, "A100": 500, "x" * 70: 100}).gate(True)
    assert (gate.required_kv_tokens, gate.required_by_gpu) == (95, {"H200": 950, "A100": 475})
    assert GateFile.parse(dumps(gate)) == gate


@given(st.lists(st.integers(1, 2000), max_size=4), st.integers(0, 2000), st.integers(0, 100))
def test_what_passes_unpromoted_is_measured_and_enough(
    tokens: list[int], minimum: int, percent: int
) -> None:
    replicas = tuple(Measured("H200", n, 100) for n in tokens)
    verdict = evaluate(replace(PLAIN, replicas=replicas), BASELINE, Thresholds(minimum, percent))
    enough = bool(tokens) and all(100 * n >= percent * 1000 and n >= minimum for n in tokens)
    assert (verdict.result is GateResult.PASSED) == enough


@given(st.lists(st.integers(950, 1000), min_size=1, max_size=6))
def test_many_small_losses_do_not_add_up(sizes: list[int]) -> None:
    """Each accepted revision is within 5 % of the baseline, whatever the one before measured."""
    best = 1000
    for tokens in sizes:
        stable = Baseline(GROUP, 100, {"H200": best})
        verdict = evaluate(
            replace(PLAIN, replicas=(Measured("H200", tokens, 100),)), stable, Thresholds(0, 95)
        )
        assert verdict.result is GateResult.PASSED and verdict.baseline == best
        best = max(best, tokens)
    assert best == 1000
