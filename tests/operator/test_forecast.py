"""Figures without a measurement: bounds hold on a machine that sizes as the server does, and no
figure is given for what the arithmetic cannot tell."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.report import Source
from kvline_operator.api.quantity import in_bytes
from kvline_operator.plan.forecast import Bounds, bounds, estimates, tokens_per_gib
from kvline_operator.store.capacity_status import CapacityStatus, Spread

MIB, GIB = 1 << 20, 1 << 30
PAGE = 16
Object = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A model on a device: what it would measure with some inputs, by the server's own steps."""

    gpu: bool
    weights: int  # MiB
    wide: int  # bytes of a token in the model's dtype
    beside: int  # bytes beside each token; on a CPU alone
    shared: int  # of these, while several sequences may share pages
    fixed: int  # MiB of a step
    of_request: int  # KiB
    of_row: int  # KiB
    vocabulary: int
    block: int
    windows: int = 0  # bytes of a request's sliding windows, in the model's dtype

    def size(self, inputs: Object, memory: int) -> CapacityStatus | None:
        """None where the model does not fit."""
        engine = inputs["engine"]
        running, rows = engine["maxRunningRequests"], engine["maxPrefillTokens"]
        step = self.fixed * MIB + 1024 * (self.of_request * running + self.of_row * rows)
        scores = self._scored(memory) * self.vocabulary * 12
        growth = max(step, scores)
        clients = 0 if self.gpu else 40 * MIB + 1000 * running
        each = self.wide // (4 if engine["kvCacheDtype"] == "fp8" else 1)
        beside = 0 if self.gpu else self.beside + self.shared * (running > 1)
        headroom = inputs["capacity"]["headroomMiB"]
        windows = self.windows * running // (4 if engine["kvCacheDtype"] == "fp8" else 1)
        taken = windows + self.weights * MIB + growth + clients
        left = memory * MIB - taken - (headroom + 24) * MIB
        tokens = (left // (each + beside) // PAGE - 1) * PAGE
        if tokens < PAGE:
            return None
        kv = tokens * each // MIB
        parts = {"weights": self.weights, "activations": -(-growth // MIB), "kv-cache": kv}
        if windows:
            parts["windows"] = -(-windows // MIB)
        if not self.gpu:
            parts["clients"] = -(-(clients + tokens * beside) // MIB)
        parts["headroom"] = headroom
        parts["others"] = memory - sum(parts.values())
        shown = Memory(memory, tuple(Part(name, mib) for name, mib in parts.items()))
        return CapacityStatus(
            kv_tokens=tokens,
            kv_tokens_total=tokens,
            spread=Spread(tokens, tokens),
            bytes_per_token=each,
            memory=MemoryV1.of(shown),
            attempts=1,
            measured_at="t",
            source=Source.MEASURED,
            fingerprint="f",
            cache_dtype="float32",
        )

    def _scored(self, memory: int) -> int:
        budget = min(memory * MIB // 16, GIB)
        rows = max(64, min(budget // (12 * self.vocabulary), 2048))
        return max(1, rows // self.block) * self.block


machines = st.builds(
    Machine,
    gpu=st.booleans(),
    weights=st.integers(10, 1500),
    wide=st.sampled_from([512, 4096, 46080, 131072]),
    beside=st.integers(0, 800),
    shared=st.integers(0, 800),
    fixed=st.integers(0, 100),
    of_request=st.integers(0, 2000),
    of_row=st.integers(0, 200),
    vocabulary=st.sampled_from([1000, 49152, 151936]),
    block=st.sampled_from([16, 64, 128]),
    windows=st.sampled_from([0, 200_000, 5_000_000]),
)
settings = st.fixed_dictionaries(
    {
        "memory": st.integers(512, 8192),
        "maxRunningRequests": st.integers(1, 64),
        "maxPrefillTokens": st.integers(64, 2048),
        "kvCacheDtype": st.sampled_from(["auto", "fp8"]),
        "headroomMiB": st.integers(0, 256),
    }
)


def inputs_of(given: Object, gpu: bool) -> Object:
    resources = {"memory": "16Gi", "gpus": 1} if gpu else {"memory": f"{given['memory']}Mi"}
    engine = {k: v for k, v in given.items() if k not in ("memory", "headroomMiB")}
    return {
        "model": {"source": "pvc://models/tiny"},
        "resources": resources,
        "engine": engine,
        "capacity": {"headroomMiB": given["headroomMiB"]},
    }


def holds(made: Bounds, measured: CapacityStatus | None) -> bool:
    tokens = measured.kv_tokens if measured is not None else 0
    return made.low <= tokens and (made.high is None or tokens <= made.high)


@given(machines, settings, settings)
def test_whatever_changes_the_machine_measures_within_the_bounds(
    machine: Machine, old: Object, new: Object
) -> None:
    old, new = {**old, "kvCacheDtype": "auto"}, {**new}
    if machine.gpu:
        new["memory"] = old["memory"]  # the GPU's own, which no spec changes
    before, after = inputs_of(old, machine.gpu), inputs_of(new, machine.gpu)
    measured = machine.size(before, old["memory"])
    assume(measured is not None)
    assert measured is not None
    assert holds(bounds(measured, before, after), machine.size(after, new["memory"]))


@given(machines, settings)
def test_what_would_help_is_what_the_machine_would_measure(machine: Machine, given: Object) -> None:
    given = {**given, "kvCacheDtype": "auto"}
    inputs, memory = inputs_of(given, machine.gpu), given["memory"]
    measured = machine.size(inputs, memory)
    assume(measured is not None)
    assert measured is not None
    for row in estimates(measured, inputs, given["maxRunningRequests"]):
        after, more = copy.deepcopy(inputs), memory
        section, field = row.field.split(".")[1:]
        if field == "memory":
            more += 1024
            assert in_bytes(row.value, "") == more * MIB and not machine.gpu
        elif row.value.isdigit():
            after[section][field] = int(row.value)
        else:
            after[section][field] = row.value
        changed = machine.size(after, more)
        tokens = changed.kv_tokens if changed is not None else 0
        if row.bound == "AtLeast":
            assert tokens >= row.kv_tokens > measured.kv_tokens
        elif row.bound == "AtMost":
            assert tokens <= row.kv_tokens
        else:
            assert abs(tokens - row.kv_tokens) <= 4 * 32  # rounded to pages


CPU = Machine(False, 513, 46080, 600, 80, 20, 1000, 60, 49152, 64)
GIVEN: Object = {
    "memory": 2048,
    "maxRunningRequests": 16,
    "maxPrefillTokens": 512,
    "kvCacheDtype": "auto",
    "headroomMiB": 32,
}


def measured(**more: Any) -> CapacityStatus:
    made = CPU.size(inputs_of(GIVEN, False), 2048)
    assert made is not None
    return replace(made, **more)


def fields(*given: Any) -> list[str]:
    return [row.field.rpartition(".")[2] for row in estimates(*given)]


def test_rows_are_given_for_what_can_be_computed() -> None:
    inputs = inputs_of(GIVEN, False)
    every = ["memory", "kvCacheDtype", "maxRunningRequests"]
    assert fields(measured(), inputs, 16) == every
    assert fields(measured(), inputs, None) == every[:2]
    assert fields(measured(), inputs, 1) == every[:2]
    assert fields(measured(cache_dtype=None), inputs, 16) == ["memory", "maxRunningRequests"]
    assert "kvCacheDtype" not in fields(measured(cache_dtype="float8_e4m3fn"), inputs, 16)
    assert fields(measured(source=Source.PINNED), inputs, 16) == []  # the pin is what it gets


def test_host_memory_is_no_row_on_a_gpu_and_an_fp8_cache_has_twice_the_tokens() -> None:
    inputs = inputs_of(GIVEN, True)
    made = replace(CPU, gpu=True).size(inputs, 2048)
    assert made is not None
    (row, _) = estimates(replace(made, cache_dtype="bfloat16"), inputs, 16)
    assert (row.field, row.value) == ("spec.engine.kvCacheDtype", "fp8")
    assert (row.kv_tokens, row.bound) == (2 * made.kv_tokens, "")


def test_a_gib_of_cache_holds_what_its_bytes_hold() -> None:
    assert tokens_per_gib(measured()) == GIB // 46080 == 23301


def bounds_of(**changes: Any) -> Bounds:
    """Of these inputs of revision, by section."""
    before = inputs_of(GIVEN, False)
    after = copy.deepcopy(before)
    for section, value in changes.items():
        after[section] = {**after.get(section, {}), **value}
    return bounds(measured(), before, after)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"maxModelLen": 4096}},  # before: the model's own, which nothing here tells
        {"resources": {"gpus": 1}},
        {"resources": {"cpu": "4"}},
        {"resources": {"cpuLimit": "4"}},
        {"model": {"source": "pvc://models/other"}},
        {"scheduling": {"nodeSelector": {"pool": "large"}}},
        {"access": {"tlsSecretRef": {"name": "tls"}}},
    ],
)
def test_what_arithmetic_cannot_tell_has_no_bound(changes: Object) -> None:
    assert bounds_of(**changes) == Bounds(0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"podMetadata": {"labels": {"team": "a"}}},
        {"imagePullSecrets": [{"name": "registry"}]},
        {"serviceAccountName": "reader"},
        {"startupSeconds": 7200},
        {"engine": {**inputs_of(GIVEN, False)["engine"], "defaultMaxTokens": 512}},
        {"engine": {**inputs_of(GIVEN, False)["engine"], "toolCallParser": "Hermes"}},
    ],
)
def test_what_no_size_depends_on_changes_no_budget(changes: Object) -> None:
    tokens, before = measured().kv_tokens, inputs_of(GIVEN, False)
    made = bounds(measured(), before, {**before, **changes})
    assert made.low == tokens and made.high is not None and made.high <= tokens + 64


def test_a_pin_is_what_a_replica_gets_or_nothing() -> None:
    tokens = measured().kv_tokens
    assert bounds_of(capacity={"kvTokens": 1024}) == Bounds(1024, 1024)
    assert bounds_of(capacity={"kvTokens": tokens + 64}) == Bounds(0, tokens + 64)


def test_half_of_the_memory_is_surely_less_and_the_half_more_surely_more() -> None:
    tokens = measured().kv_tokens
    less, more = bounds_of(resources={"memory": "1536Mi"}), bounds_of(resources={"memory": "3Gi"})
    assert less.high is not None and less.high < 0.8 * tokens
    assert more.low > 1.5 * tokens
    assert bounds_of(resources={"memory": "2147483648"}).low == tokens  # the same, in bytes
