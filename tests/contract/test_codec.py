"""The codec: strict where it must be, tolerant where it may, bounded always."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.codec import ContractError, decode, encode, loads
from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    GateFile,
    Images,
    KVCacheDtype,
    LaunchConfig,
    LoadFormat,
    Method,
    Model,
    Records,
    Speculation,
    StateDtype,
    ToolCallParser,
)
from kvline_contract.load import Load
from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    Attempt,
    Binding,
    Direction,
    Knob,
    Outcome,
    SizingReport,
    Stage,
    State,
    Termination,
)

text = st.text(max_size=40)
count = st.integers(0, 2**40)


def optional(low: int, high: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(low, high)


launches = st.builds(
    LaunchConfig,
    version=st.just(1),
    namespace=text,
    service=text,
    revision=st.text(max_size=16),
    image=text,
    device=st.sampled_from(Device),
    tensor_parallel=st.integers(1, 8),
    model=st.builds(
        Model,
        source=text,
        path=text.map(lambda t: "/" + t),
        served_name=text,
        load_format=st.sampled_from(LoadFormat),
    ),
    engine=st.builds(
        EngineOptions,
        optional(16, 2**31 - 1),
        optional(1, 4096),
        optional(16, 65536),
        optional(0, 20),
        st.none() | st.sampled_from(KVCacheDtype),
        st.none() | st.builds(Speculation, st.sampled_from(Method), optional(1, 7)),
        optional(1, 2**31 - 1),
        st.none() | st.sampled_from(ToolCallParser),
        optional(0, 65536),
        st.none() | st.sampled_from(StateDtype),
        st.none() | st.sampled_from(Images),
        optional(1, 64),
        optional(4, 65536),
    ),
    capacity=st.builds(CapacityOptions, optional(16, 2**40), optional(0, 65536)),
    require_api_key=st.booleans(),
)


@st.composite
def memories(draw: st.DrawFn) -> MemoryV1:
    a, b, c, d, e, f = draw(st.lists(st.integers(0, 10**6), min_size=6, max_size=6))
    return MemoryV1(a + b + c + d + e + f, a, b, c, d, e, f)


attempts = st.builds(
    Attempt,
    number=st.integers(0, 16),
    target_tokens=count,
    outcome=st.sampled_from(Outcome),
    lowest_free_mib=st.none() | st.integers(-1000, 10**6),
)
terminations = st.builds(
    Termination,
    version=st.just(1),
    code=st.integers(0, 255),
    name=text,
    message=text,
    memory=st.none() | memories(),
    binding=st.none() | st.sampled_from(Binding),
    largest_max_model_len=st.none() | count,
    knobs=st.lists(
        st.builds(
            Knob,
            text,
            st.sampled_from(Direction),
            st.none() | count,
            st.none() | st.booleans(),
        ),
        max_size=8,
    ).map(tuple),
    attempts=st.lists(attempts, max_size=5).map(tuple),
)
reports = st.builds(
    SizingReport,
    pod_uid=text,
    pod_name=text,
    revision=st.text(max_size=16),
    sequence=count,
    state=st.sampled_from([s for s in State if s is not State.VALIDATED]),
    started_at=st.text(max_size=32),
    updated_at=st.text(max_size=32),
    stages=st.lists(st.builds(Stage, text, count, count, st.none() | text), max_size=4).map(tuple),
    attempts=st.lists(attempts, max_size=5).map(tuple),
    failure=st.none() | terminations,
    warnings=st.lists(text, max_size=4).map(tuple),
)


@given(launches)
def test_launch_files_come_back_as_they_were(launch: LaunchConfig) -> None:
    assert LaunchConfig.parse(launch.dumps()) == launch


@given(reports)
def test_reports_come_back_as_they_were(report: SizingReport) -> None:
    assert SizingReport.parse(report.dumps()) == report


@given(terminations)
def test_terminations_always_fit_the_message_file(termination: Termination) -> None:
    assert len(termination.dumps().encode()) <= 4096


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | text,
        lambda s: st.lists(s) | st.dictionaries(text, s),
        max_leaves=20,
    )
)
def test_any_json_is_a_report_or_a_contract_error(value: object) -> None:
    try:
        SizingReport.parse(json.dumps(value))
    except ContractError as error:
        assert str(error)


def test_an_unknown_launch_key_is_refused_and_named() -> None:
    launch = example_launch()
    value = encode(launch)
    value["engine"]["maxModelLength"] = 5
    with pytest.raises(ContractError, match=r"engine\.maxModelLength: unknown field"):
        LaunchConfig.parse(json.dumps(value))


def test_an_unknown_report_key_is_ignored() -> None:
    value = json.loads(example_report().dumps())
    value["somethingNew"] = {"a": 1}
    assert SizingReport.parse(json.dumps(value)) == example_report()


@pytest.mark.parametrize("version", [0, 4, 99, None, True, "1"])
def test_other_versions_are_refused_with_all_named(version: object) -> None:
    value = json.loads(example_report().dumps())
    value["version"] = version
    with pytest.raises(ContractError, match="version") as error:
        SizingReport.parse(json.dumps(value))
    assert repr(version) in str(error.value) and "1, 2 and 3 can be read" in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequence": -1}, "sequence"),
        ({"sequence": 1.5}, "1.5"),
        ({"sequence": True}, "sequence"),
        ({"state": "Happy"}, "state"),
        ({"podUID": "x" * 65}, "podUID"),
        ({"stages": [{"name": "a", "ms": 1, "bytes": 1}] * 37}, "stages"),
        ({"attempts": {}}, "attempts"),
        ({"state": "Validated"}, "result"),
    ],
)
def test_a_broken_field_is_named(change: dict[str, object], named: str) -> None:
    value = json.loads(example_report().dumps()) | change
    with pytest.raises(ContractError, match=named):
        SizingReport.parse(json.dumps(value))


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{", b'{"version": NaN}', b'{"a":1,"a":2}', b"\xff", b"[" * 100000],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ContractError):
        loads(raw, 1 << 20)


def test_a_long_document_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ContractError, match="at most 65536"):
        SizingReport.parse(b"{" + b" " * 70000 + b"}")


def test_a_relative_model_path_is_refused() -> None:
    with pytest.raises(ContractError, match="absolute"):
        Model("s", "models/x", "x")


@pytest.mark.parametrize("seconds", [0, -1, 3601, "120", True])
def test_a_drain_has_bounds(seconds: object) -> None:
    value = {**json.loads(example_launch().dumps()), "drainSeconds": seconds}
    with pytest.raises(ContractError, match="drainSeconds"):
        LaunchConfig.parse(json.dumps(value))


def test_a_launch_without_a_drain_stays_as_it_was_written() -> None:
    """Launch files are stored in immutable objects: a new optional field must not change them."""
    text = example_launch().dumps()
    assert "drainSeconds" not in text
    assert LaunchConfig.parse(text).drain_seconds is None
    value = {**json.loads(text), "drainSeconds": 3600}
    assert LaunchConfig.parse(json.dumps(value)).drain_seconds == 3600


def test_the_gate_ignores_what_it_does_not_know() -> None:
    gate = GateFile.parse('{"version":1,"open":true,"minKVTokens":5,"requiredKVTokens":9,"x":1}')
    assert gate.open
    assert gate.threshold() == 9


def test_a_gate_s_threshold_is_that_of_the_replica_s_own_gpu_model() -> None:
    text = '{"version":1,"open":true,"requiredKVTokens":7,"requiredByGPU":{"A100":7,"H200":9}}'
    gate = GateFile.parse(text)
    assert [gate.threshold(gpu) for gpu in ("H200", "A100", "L4", "")] == [9, 7, 7, 7]
    own = replace(gate, min_kv_tokens=8)
    assert [own.threshold(gpu) for gpu in ("H200", "A100", "L4")] == [9, 8, 8]
    assert GateFile(1, True, 5, 9).threshold("H200") == 9, "an operator that writes no map"


def test_records_and_load_are_read_by_key() -> None:
    record = {
        "kvTokens": 10,
        "freeMiB": 1,
        "loopMs": 5,
        "measuredAt": "t",
        "memory": encode(MemoryV1(6, 1, 1, 1, 1, 1, 1)),
    }
    text = json.dumps({"version": 1, "reuse": "Auto", "records": {"ab": record}})
    assert Records.parse(text).records["ab"].kv_tokens == 10
    for load in (
        Load(1, 2, 3, 4, 5, 6, 7, 8, 9, False),
        Load(1, 2, 3, 4, 5, 6, 7, 8, 9, False, retrying=3, arriving_milli=-500),
    ):
        assert decode(Load, encode(load), strict=True) == load
    assert "arrivingMilli" not in encode(Load(1, 2, 3, 4, 5, 6, 7, 8, 9, False))


def example_launch() -> LaunchConfig:
    return LaunchConfig(
        1,
        "ns",
        "svc",
        "abcde",
        "image",
        Device.CPU,
        1,
        Model("pvc://a/b", "/models/b", "b"),
        EngineOptions(),
        CapacityOptions(),
    )


def example_report() -> SizingReport:
    return SizingReport("uid", "pod", "abcde", 3, State.PROBING, "t0", "t1")
