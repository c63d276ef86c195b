"""Versions of the sizing report and version 1 of everything, across an upgrade in both directions.

`golden/written-v1` is what the last commit before version 2 wrote, byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.codec import ContractError, decode, dumps, encode, loads
from kvline_contract.launch import MAX_GATE_GPUS, GateFile, Record, Records
from kvline_contract.memory import FIGURES, OTHERS, STORED_PARTS, Memory, MemoryV1, Part
from kvline_contract.report import (
    Attempt,
    Binding,
    Direction,
    Knob,
    Outcome,
    Result,
    SizingReport,
    Termination,
    served,
)
from kvline_operator.store.capacity_status import CapacityStatus

WRITTEN = Path(__file__).parent / "golden" / "written-v1"
V1_KEYS = {
    f"{n}MiB" for n in ("total", "weights", "activations", "graphs", "kv", "headroom", "others")
}


def written(name: str) -> str:
    return (WRITTEN / name).read_text()


def memory(**parts: int) -> Memory:
    named = tuple(Part(name.replace("_", "-"), mib) for name, mib in parts.items())
    return Memory(sum(parts.values()), named)


def validated(*ranks: Memory, dtype: str | None = None) -> SizingReport:
    report = SizingReport.parse(written("validated.json"))
    assert report.result is not None
    return replace(report, result=replace(report.result, ranks=ranks, cache_dtype=dtype))


def result(report: SizingReport) -> Result:
    assert report.result is not None
    return report.result


def figures(version_1: str) -> dict[str, Any]:
    """result.memory as readers of version 1 know it."""
    found = json.loads(version_1)["result"]["memory"]
    return {key: found[key] for key in V1_KEYS}


@pytest.mark.parametrize("name", ["loading", "validated", "failed"])
def test_a_report_of_version_1_is_read_and_written_again_as_it_was(name: str) -> None:
    text = written(f"{name}.json")
    report = SizingReport.parse(text)
    assert json.loads(report.dumps(version=1)) == json.loads(text)
    again = SizingReport.parse(report.dumps(version=2))
    assert again == report
    assert json.loads(again.dumps(version=1)) == json.loads(text)


@pytest.mark.parametrize("version", [2, 3])
def test_version_2_has_parts_by_rank_and_the_cache_s_type(version: int) -> None:
    report = validated(memory(weights=5, kv_cache=3, experts=2), dtype="bfloat16")
    found = json.loads(report.dumps(version))
    assert found["version"] == version and "memory" not in found["result"]
    parts = [("weights", 5), ("kv-cache", 3), ("experts", 2)]
    rank = {"totalMiB": 10, "parts": [{"name": name, "mib": mib} for name, mib in parts]}
    assert found["result"]["ranks"] == [rank]
    assert found["result"]["cacheDtype"] == "bfloat16"


def test_stored_documents_of_version_1_are_written_again_byte_for_byte() -> None:
    """Records and annotations: an upgrade rewrites none."""
    records = Records.parse(written("records.json"))
    assert dumps(records) == written("records.json")
    ended = Termination.parse(written("termination.json"))
    assert ended.dumps() == written("termination.json")
    kept = CapacityStatus.parse(written("capacity.json"))
    assert kept is not None and kept.dumps() == written("capacity.json")


def test_a_reader_of_version_1_gets_true_sums_of_parts_that_it_does_not_know() -> None:
    report = validated(memory(weights=5, kv_cache=3, experts=2, state=4, headroom=1))
    seen = figures(report.dumps(version=1))
    assert seen == {
        "totalMiB": 15,
        "weightsMiB": 5,
        "activationsMiB": 0,
        "graphsMiB": 0,
        "kvMiB": 3,
        "headroomMiB": 1,
        "othersMiB": 6,
    }
    record = json.loads(dumps(Record.of(result(report))))["memory"]
    assert {key: record[key] for key in V1_KEYS} == seen


def test_of_several_ranks_version_1_has_the_one_that_limits_the_budget() -> None:
    """All map the same cache, so the one with the least left is the smallest."""
    ranks = [memory(weights=w, kv_cache=30, headroom=70 - w) for w in (20, 40, 10)]
    report = validated(*ranks)
    assert result(report).memory == ranks[1]
    assert figures(report.dumps(version=1))["weightsMiB"] == 40
    assert result(report).binding_rank == 1
    record = Record.of(result(report))
    assert record.memory.upgraded().mib("weights") == 40 and record.ranks == 3
    assert record.like(3) and not record.like(1)
    for version in (1, 2, 3):  # and none of the others is lost on the way
        assert SizingReport.parse(report.dumps(version)) == report


names = st.sampled_from([*FIGURES, "experts", "encoder", "state", "lora", "a", "x" * 32])


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    parts = tuple(
        Part(
            name,
            draw(st.integers(-(10**6) if name == OTHERS else 0, 10**6)),
            draw(st.none() | st.text(max_size=64)),
        )
        for name in draw(st.lists(names, unique=True, max_size=STORED_PARTS))
    )
    # A total is never negative: the rest is what the parts leave of it.
    short = -min(0, sum(part.mib for part in parts))
    parts = (*parts, Part("pad", short))
    return Memory(sum(part.mib for part in parts), parts, draw(st.none() | st.integers(0, 7)))


@st.composite
def memories_v1(draw: st.DrawFn) -> MemoryV1:
    a, b, c, d, e = draw(st.lists(st.integers(0, 10**6), min_size=5, max_size=5))
    others = draw(st.integers(-(a + b + c + d + e), 10**6))
    return MemoryV1(a + b + c + d + e + others, a, b, c, d, e, others)


@given(memories_v1())
def test_what_version_1_can_hold_survives_version_2(found: MemoryV1) -> None:
    assert MemoryV1.of(found.upgraded()) == found
    plain = loads(dumps(found), 4096)
    assert set(plain) == V1_KEYS
    report = validated(found.upgraded())
    assert figures(SizingReport.parse(report.dumps(version=2)).dumps(version=1)) == plain


@given(st.lists(memories(), min_size=1, max_size=8), st.none() | st.text(max_size=16))
def test_what_version_2_holds_survives_both_versions(
    ranks: list[Memory], dtype: str | None
) -> None:
    if len(ranks) == 1:  # version 1 has no GPU's index, which a rank alone does not need
        ranks = [replace(ranks[0], gpu=None)]
    report = validated(*ranks, dtype=dtype)
    for version in (1, 2, 3):
        text = report.dumps(version)
        assert SizingReport.parse(text) == report
    seen = figures(report.dumps(version=1))
    assert sum(seen.values()) == 2 * seen["totalMiB"]


@given(memories(), st.integers(1, 8))
def test_records_lose_no_part_and_say_how_many_ranks_where_several(
    found: Memory, ranks: int
) -> None:
    record = Record.of(result(validated(*[found] * ranks)))
    again = decode(Record, loads(dumps(record), 1 << 16), strict=True)
    assert again.memory.upgraded() == replace(found, gpu=None)
    assert json.loads(dumps(record)).get("ranks", 1) == ranks and again.like(ranks)


def test_a_termination_drops_parts_only_where_nothing_else_is_left_to_cut() -> None:
    parts = tuple(Part(f"{i:x}".rjust(32, "p"), 10**6, "\u00e9" * 64) for i in range(STORED_PARTS))
    knobs = (Knob("k" * 64, Direction.RAISE, 2**50, True),) * 8
    attempts = (Attempt(1, 2**50, Outcome.OUT_OF_MEMORY, 2**50),) * 5
    full = MemoryV1.of(Memory(STORED_PARTS * 10**6, parts))
    ended = Termination(1, 40, "n", "m" * 1024, full, Binding.WEIGHTS, 1, knobs, attempts)
    read = Termination.parse(ended.dumps())
    assert read.memory is not None and read.memory.total_mib == full.total_mib
    assert read.knobs == knobs and read.attempts == attempts
    few = replace(ended, knobs=(), attempts=())
    assert Termination.parse(few.dumps()).memory == full


@pytest.mark.parametrize(
    ("query", "version"),
    [("", 1), ("version=1", 1), ("version=2", 2), ("version=4", 3), ("a=b&version=3", 3)],
)
def test_a_pod_serves_the_newest_version_that_both_know(query: str, version: int) -> None:
    assert served(query) == version


@pytest.mark.parametrize("asked", ["", "0", "-1", "two", "1.5", "9" * 5000, "\u0662"])
def test_what_is_no_version_is_an_error_that_names_it(asked: str) -> None:
    with pytest.raises(ContractError, match="version: expected a number") as error:
        served(f"version={asked}")
    assert asked[:20] in str(error.value)


def test_an_unknown_version_of_a_stored_document_is_named() -> None:
    for name, parse in (("records.json", Records.parse), ("termination.json", Termination.parse)):
        value = json.loads(written(name)) | {"version": 7}
        with pytest.raises(ContractError, match=r"version: \w+.* of version 7"):
            parse(json.dumps(value))
    with pytest.raises(ContractError, match="of version 4"):
        validated(memory(weights=1)).dumps(version=4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"totalMiB": 11}, "add up"),
        ({"parts": [{"name": "a", "mib": 5}] * 2}, "two have one name"),
        ({"parts": [{"name": "KV cache", "mib": 10}]}, "name: expected"),
        ({"parts": [{"name": "x" * 33, "mib": 10}]}, "name: 33 characters"),
        ({"parts": [{"name": "weights", "mib": -1}]}, "only others"),
        ({"parts": [{"name": "a", "mib": 10, "detail": "d" * 65}]}, "detail: 65 characters"),
        ({"parts": [{"name": "a", "mib": 0}] * 25}, "25 items"),
    ],
)
def test_a_broken_part_is_named(change: dict[str, Any], named: str) -> None:
    rank = encode(memory(weights=10)) | change
    value = json.loads(validated(memory(weights=10)).dumps())
    value["result"]["ranks"] = [rank]
    with pytest.raises(ContractError, match=rf"result\.ranks\[0\].*{named}"):
        SizingReport.parse(json.dumps(value))
    value["result"]["ranks"] = []
    with pytest.raises(ContractError, match="ranks: expected one or more"):
        SizingReport.parse(json.dumps(value))


def test_a_gate_file_has_a_token_s_digest_where_the_operator_wrote_one_alone() -> None:
    """Files of earlier operators are written again byte for byte; earlier servers ignore it."""
    earlier = GateFile(1, False, 1000, 900, {"NVIDIA H200": 900})
    text = dumps(earlier)
    assert GateFile.parse(text) == earlier and "token" not in text
    newer = replace(earlier, token_sha256="f" * 64)
    found = json.loads(dumps(newer))
    assert found.pop("tokenSHA256") == "f" * 64 and found == json.loads(text)
    assert found["version"] == 1
    gpus = {f"{number:064}": 2**53 - 1 for number in range(MAX_GATE_GPUS)}
    largest = replace(newer, required_by_gpu=gpus, min_kv_tokens=2**53 - 1)
    assert GateFile.parse(dumps(largest)) == largest
    with pytest.raises(ContractError, match="tokenSHA256: 65 characters"):
        GateFile.parse(dumps(replace(newer, token_sha256="f" * 65)))


def test_a_gate_admits_what_holds_both_its_tokens_and_its_sequences() -> None:
    plain = result(validated(memory(weights=1)))
    tokens = plain.kv_tokens
    hybrid = replace(plain, state_slots=256)
    gate = GateFile(1, True, tokens, required_sequences=256)
    assert GateFile.parse(dumps(gate)) == gate
    assert gate.admits(hybrid) and not gate.admits(replace(hybrid, kv_tokens=tokens - 1))
    assert not gate.admits(replace(hybrid, state_slots=255))
    assert gate.admits(plain), "no layer keeps a state, so none bounds its sequences"
    assert GateFile(1, True).admits(hybrid)
    assert "Sequences" not in dumps(GateFile(1, True))


def test_a_report_without_slots_is_read_and_the_lesser_capacity_counts() -> None:
    report = validated(memory(weights=5, states=7, snapshots=2))
    plain = result(report)
    assert plain.state_slots is plain.snapshots is plain.slot_bytes is None
    assert plain.state_dtype is None and plain.bfloat16_slot_bytes is None
    for absent in ("stateSlots", "snapshots", "slotBytes", "stateDtype", "bfloat16SlotBytes"):
        assert absent not in json.loads(report.dumps())["result"]
    length = plain.kv_tokens // 4
    assert plain.sequences(length) == 4
    for slots, least in ((3, 3), (4, 4), (9, 4)):
        hybrid = replace(plain, state_slots=slots, snapshots=0, slot_bytes=1 << 20)
        hybrid = replace(hybrid, state_dtype="float32", bfloat16_slot_bytes=1 << 19)
        assert hybrid.sequences(length) == least
        assert replace(hybrid, sequence_tokens=2 * length).sequences(length) == min(2, slots)
        for version in (1, 2, 3):
            again = SizingReport.parse(replace(report, result=hybrid).dumps(version))
            assert again.result == hybrid
        record = decode(Record, loads(dumps(Record.of(hybrid)), 1 << 16), strict=True)
        assert (record.state_slots, record.snapshots, record.state_dtype) == (slots, 0, "float32")


def test_only_the_token_itself_is_known_by_its_digest() -> None:
    token = "0123456789abcdef"
    gate = GateFile(1, False, token_sha256=sha256(token.encode()).hexdigest())
    assert gate.knows(token) and not gate.knows(token[:-1]) and not gate.knows("")
    assert not gate.knows(gate.token_sha256 or "") and not gate.knows("\u00e9")
    assert not GateFile(1, False).knows("") and not GateFile(1, False, token_sha256="").knows("")


def test_figures_of_version_1_must_add_up() -> None:
    with pytest.raises(ContractError, match="add up"):
        MemoryV1(100, 10, 10, 10, 10, 10, 10)
    value = json.loads(written("validated.json"))
    value["result"]["memory"]["kvMiB"] += 1
    with pytest.raises(ContractError, match=r"result\.memory: .*add up"):
        SizingReport.parse(json.dumps(value))
