"""Figures without a measurement: bounds hold on a machine that sizes as the server does, and no
figure is given for what the arithmetic cannot tell."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvline_contract.launch import usual_snapshots
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.report import Source
from kvline_operator.api.quantity import in_bytes
from kvline_operator.plan.forecast import Bounds, bounds, estimates, tokens_per_gib
from kvline_operator.store.capacity_status import CapacityStatus, Spread

MIB, GIB = 1 << 20, 1 << 30
PAGE = 16
MOST = 64  # requests that run at once
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
    window: int = 1024  # tokens that some layers see
    hidden: int = 0  # bytes of a token in these, in the model's dtype; 0: there are none
    state: int = 0  # bytes of a sequence's recurrent state; 0: there is none
    # MiB of an encoder's weights, and KiB of its largest step, for each patch: what of them is
    # kept, and what a step of the language model takes more
    tower: int = 0
    of_patch: int = 0

    def _patches(self, engine: Object) -> int | None:
        """Of an image, whose tokens the context has room for beside a text; None where more are
        asked for, 0 where no images are served."""
        if not self.tower or "image" not in engine.get("modalities", ["text"]):
            return 0
        asked, most = engine.get("maxImagePatches"), 4 * (engine["maxModelLen"] - 16)
        if asked is None:
            return int(min(16384, most))
        return int(asked) if asked <= most else None

    def size(self, inputs: Object, memory: int) -> CapacityStatus | None:
        """None where the model does not fit."""
        engine = {"maxRunningRequests": None, **inputs["engine"]}
        rows, headroom = engine["maxPrefillTokens"], inputs["capacity"]["headroomMiB"]
        scale = 4 if engine["kvCacheDtype"] == "fp8" else 1
        frees = engine["maxModelLen"] > self.window and self.hidden > 0
        windows = [
            frees * (count * (self.window + 32) + rows) * self.hidden // scale
            for count in range(MOST + 1)
        ]
        asked, small = engine.get("prefixSnapshots"), engine.get("stateDtype") == "bfloat16"

        def states(running: int) -> int:
            """Of sequences, of prefixes, and of rows that only fill a batch."""
            kept = usual_snapshots(running) if asked is None else asked
            return (running + kept + 1) * self._slot(small)

        reserved = [taken + states(count) for count, taken in enumerate(windows)]
        running = engine["maxRunningRequests"] or self._running(
            reserved, (memory - self.weights - headroom) * MIB
        )
        if (patches := self._patches(engine)) is None:
            return None
        step = self.fixed * MIB + 1024 * (self.of_request * running + self.of_row * rows)
        step += 16 * patches
        scores = self._scored(memory) * self.vocabulary * 12
        growth = max(step, scores)
        clients = 0 if self.gpu else 40 * MIB + 1000 * running + 100 * patches
        tower = self.tower * MIB * (patches > 0)
        encodes = tower + 1024 * self.of_patch * patches
        full = (self.wide + self.hidden) // scale
        each = self.wide // scale if frees else full
        beside = 0 if self.gpu else self.beside + self.shared * (running > 1)
        taken = reserved[running] + self.weights * MIB + growth + clients + encodes
        left = memory * MIB - taken - (headroom + 24) * MIB
        tokens = (left // (each + beside) // PAGE - 1) * PAGE
        if tokens < PAGE:
            return None
        kv = tokens * each // MIB
        parts = {"weights": self.weights, "activations": -(-growth // MIB), "kv-cache": kv}
        if frees:
            parts["windows"] = -(-windows[running] // MIB)
        if self.state:
            parts["states"] = -(-states(running) // MIB)
        if patches:
            parts["tower"] = self.tower
            work = 1024 * self.of_patch * patches
            parts |= {"encoder-work": work // MIB, "encoder-cache": -(-(work % MIB) // MIB)}
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
            full_bytes_per_token=full if self.hidden else None,
            **self._slots(running, asked, small),
        )

    def _slot(self, small: bool) -> int:
        """Inputs of the convolution, a part in 32, keep their dtype."""
        return self.state // 32 + self.state * 31 // 64 if small else self.state

    def _slots(self, running: int, asked: int | None, small: bool) -> Object:
        if not self.state:
            return {}
        snapshots = usual_snapshots(running) if asked is None else asked
        found = {"sequences": running, "snapshots": snapshots, "slot_bytes": self._slot(small)}
        return found | ({} if small else {"bfloat16_slot_bytes": self._slot(True)})

    def _running(self, reserved: list[int], left: int) -> int:
        """Where the spec does not say."""
        running = MOST
        while running > 8 and reserved[running] > left // 2:
            running //= 2
        while running > 1 and left - reserved[running] < left // 4:
            running //= 2
        return running

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
    window=st.sampled_from([512, 1024, 4096]),
    hidden=st.sampled_from([0, 0, 4096, 40960]),
    state=st.sampled_from([0, 0, 1 << 18, 20 << 20]),
    tower=st.sampled_from([0, 7, 120]),
    of_patch=st.integers(0, 20),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "memory": st.integers(512, 8192),
    "maxModelLen": st.sampled_from([256, 1024, 2048, 8192]),
    "maxRunningRequests": st.one_of(st.none(), st.integers(1, MOST)),
    "maxPrefillTokens": st.integers(64, 2048),
    "kvCacheDtype": st.sampled_from(["auto", "fp8"]),
    "headroomMiB": st.integers(0, 256),
    "prefixSnapshots": st.one_of(st.none(), st.integers(0, MOST)),
    "stateDtype": st.sampled_from([None, "float32", "bfloat16"]),
    "modalities": st.sampled_from([["text"], ["text", "image"]]),
    "maxImagePatches": st.sampled_from([None, 64, 4096, 16384]),
}
settings = st.fixed_dictionaries(FIELDS)


def inputs_of(given: Object, gpu: bool) -> Object:
    resources = {"memory": "16Gi", "gpus": 1} if gpu else {"memory": f"{given['memory']}Mi"}
    beside = ("memory", "headroomMiB")
    engine = {k: v for k, v in given.items() if k not in beside and v is not None}
    return {
        "model": {"source": "pvc://models/tiny"},
        "resources": resources,
        "engine": engine,
        "capacity": {"headroomMiB": given["headroomMiB"]},
    }


def holds(made: Bounds, measured: CapacityStatus | None) -> bool:
    tokens = measured.kv_tokens if measured is not None else 0
    return made.low <= tokens and (made.high is None or tokens <= made.high)


@given(machines, settings, settings, st.sets(st.sampled_from(sorted(FIELDS)), max_size=2))
def test_whatever_changes_the_machine_measures_within_the_bounds(
    machine: Machine, old: Object, new: Object, changed: set[str]
) -> None:
    old = {**old, "kvCacheDtype": "auto"}
    if changed:  # else all
        new = {**old, **{name: new[name] for name in changed}}
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
        elif field == "modalities":
            after[section][field] = [row.value]
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
    "maxModelLen": 8192,
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
        {"engine": {"maxTopLogprobs": 4}},  # before: the default, which nothing here tells
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


def test_slots_are_counted_as_what_they_take() -> None:
    """Snapshots exactly; requests at least, as steps and windows take less with them too."""
    hybrid = replace(CPU, gpu=True, state=4 << 20)
    before = inputs_of({**GIVEN, "prefixSnapshots": 32}, True)
    made = hybrid.size(before, 2048)
    assert made is not None and (made.sequences, made.snapshots) == (16, 32)

    def found(**engine: Any) -> Bounds:
        assert made is not None
        return bounds(made, before, {**before, "engine": {**before["engine"], **engine}})

    slot = (4 << 20) / 46080
    for snapshots in (0, 33):
        more, gained = found(prefixSnapshots=snapshots), (32 - snapshots) * slot
        assert abs(more.low - made.kv_tokens - gained) < 64
        assert more.high is not None and abs(more.high - made.kv_tokens - gained) < 64
    assert found(maxRunningRequests=8).low > made.kv_tokens + 8 * slot - 64
    raised = found(maxRunningRequests=32)
    assert raised.low == 0 and raised.high is not None
    assert raised.high < made.kv_tokens - 16 * slot + 64
    assert found(prefixSnapshots=None) == Bounds(0, None), "the server's default"
    (row,) = (r for r in estimates(made, before, 16) if r.field.endswith("prefixSnapshots"))
    assert (row.value, row.bound) == ("16", "AtLeast")
    assert abs(row.kv_tokens - made.kv_tokens - 16 * slot) < 64


def gemma(max_model_len: int, running: int | None = 128) -> tuple[CapacityStatus, Object]:
    """gemma-3-12b on an H200: 40 of 48 layers see 1,024 tokens."""
    frees = max_model_len > 1024
    kv, tokens, each = (72282, 1_156_512, 65536) if frees else (117088, 312_240, 393_216)
    parts = [Part("weights", 22500), Part("activations", 2500), Part("kv-cache", kv)]
    parts += [Part("windows", 44806)] if frees else []
    parts += [Part("headroom", 500), Part("others", 412)]
    made = measured(
        kv_tokens=tokens,
        bytes_per_token=each,
        full_bytes_per_token=393_216,
        memory=MemoryV1.of(Memory(143_000, tuple(parts))),
        cache_dtype="bfloat16",
    )
    engine = {"maxModelLen": max_model_len, "maxRunningRequests": running}
    given = {**inputs_of(GIVEN, True), "engine": {k: v for k, v in engine.items() if v is not None}}
    return made, given


def with_length(inputs: Object, length: int) -> Object:
    return {**inputs, "engine": {**inputs["engine"], "maxModelLen": length}}


def test_a_context_across_the_window_changes_what_a_token_takes() -> None:
    long, inputs = gemma(8192)
    shorter = bounds(long, inputs, with_length(inputs, 1024))
    assert shorter.low <= 312_234 and shorter.high is not None
    assert bounds(long, inputs, with_length(inputs, 16384)).high is not None, "it frees as before"
    short, inputs = gemma(1024)
    assert bounds(short, inputs, with_length(inputs, 8192)) == Bounds(0, None)
    assert bounds(short, inputs, with_length(inputs, 512)).low >= short.kv_tokens
    without = replace(short, full_bytes_per_token=None)  # no layer has a window
    raised = bounds(without, inputs, with_length(inputs, 8192)).high
    assert raised is not None and raised < 1.01 * short.kv_tokens


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("capacity", "headroomMiB", 4096),
        ("capacity", "headroomMiB", 0),
        ("engine", "maxPrefillTokens", 64),
        ("resources", "memory", "3Gi"),
        ("resources", "memory", "1Gi"),
    ],
)
def test_what_sets_how_many_requests_run_has_no_bound_where_windows_are_kept_for_them(
    section: str, field: str, value: object
) -> None:
    made, inputs = gemma(8192, running=None)
    if field == "memory":
        inputs["resources"] = {"memory": "2Gi"}
    inputs["engine"]["maxPrefillTokens"] = 512
    after = {**inputs, section: {**inputs[section], field: value}}
    assert bounds(made, inputs, after) == Bounds(0, None)
    assert "memory" not in fields(made, inputs, 128)
    for each in (inputs, after):
        each["engine"] = {**each["engine"], "maxRunningRequests": 128}
    assert bounds(made, inputs, after) != Bounds(0, None)


def test_states_behind_draft_tokens_have_no_bound() -> None:
    """Their number is in no status, and follows from how many requests run."""
    hybrid = replace(CPU, gpu=True, state=4 << 20)
    before = inputs_of({**GIVEN, "prefixSnapshots": 32}, True)
    made = hybrid.size(before, 2048)
    assert made is not None
    drafts = {"speculation": {"method": "NGram", "maxSequences": 2}}
    unknown = Bounds(0, None)

    def found(had: Object, **engine: Any) -> Bounds:
        old = {**before, "engine": {**before["engine"], **had}}
        return bounds(made, old, {**old, "engine": {**old["engine"], **engine}})

    assert found({}, **drafts) == unknown
    for change in ({"maxRunningRequests": 8}, {"stateDtype": "bfloat16"}):
        assert found(drafts, **change) == unknown != found({}, **change)
    assert found(drafts, prefixSnapshots=0) == found({}, prefixSnapshots=0)


def test_states_in_bfloat16_leave_half_of_their_memory_at_most() -> None:
    """Of those that are asked for with it; as a row where the model is served so."""
    hybrid = replace(CPU, gpu=True, state=4 << 20)
    before = inputs_of({**GIVEN, "prefixSnapshots": 32}, True)
    made = hybrid.size(before, 2048)
    assert made is not None and made.bfloat16_slot_bytes is not None

    def found(made: CapacityStatus, **engine: Any) -> Bounds:
        return bounds(made, before, {**before, "engine": {**before["engine"], **engine}})

    gained = (16 + 32 + 1) * ((4 << 20) - made.bfloat16_slot_bytes) / 46080
    asked = found(made, stateDtype="bfloat16")
    assert asked.low == made.kv_tokens and asked.high is not None
    assert abs(asked.high - made.kv_tokens - gained) < 64
    assert found(made, stateDtype="float32") == found(made), "which is the default"
    (row,) = (r for r in estimates(made, before, 16) if r.field.endswith("stateDtype"))
    assert (row.value, row.bound, row.kv_tokens) == ("bfloat16", "AtMost", asked.high)
    more = found(made, stateDtype="bfloat16", prefixSnapshots=64)
    after = (16 + 64 + 1) * made.bfloat16_slot_bytes - (16 + 32 + 1) * (4 << 20)
    assert more.high is not None and abs(more.high - made.kv_tokens + after / 46080) < 64
    refused = replace(made, bfloat16_slot_bytes=None)  # of Mamba2
    assert found(refused, stateDtype="bfloat16") == Bounds(0, None)
    assert "stateDtype" not in fields(refused, before, 16)
    plain = replace(refused, sequences=None, snapshots=None, slot_bytes=None)
    assert found(plain, stateDtype="float32") == Bounds(0, None), "it does not start"


def test_text_alone_leaves_what_the_encoder_of_images_takes() -> None:
    """By its parts, as a row too; turned on, what it takes is unknown before a measurement."""
    sees = replace(CPU, gpu=True, tower=120, of_patch=20)
    before = inputs_of({**GIVEN, "modalities": ["text", "image"], "maxImagePatches": 4096}, True)
    made = sees.size(before, 2048)
    assert made is not None

    def found(made: CapacityStatus, **engine: Any) -> Bounds:
        return bounds(made, before, {**before, "engine": {**before["engine"], **engine}})

    text = found(made, modalities=["text"])
    gained = (120 + 80) * MIB / 46080
    assert 0 <= made.kv_tokens + gained - text.low < 3 * MIB / 46080 + 64
    assert text.high is not None and text.high > text.low
    assert found(made, modalities=["text"], maxImagePatches=None) == text, "the bound goes too"
    (row,) = (r for r in estimates(made, before, 16) if r.field.endswith("modalities"))
    assert (row.field, row.value) == ("spec.engine.modalities", "text")
    assert (row.bound, row.kv_tokens) == ("AtLeast", text.low)
    smaller, larger = found(made, maxImagePatches=1024), found(made, maxImagePatches=8192)
    assert smaller.low == made.kv_tokens and smaller.high is not None
    assert larger.low == 0 and larger.high == found(made).high
    assert found(made, maxImagePatches=None) == Bounds(0, None), "the server's default"
    assert found(made, maxModelLen=4096).low == 0, "its context may have no room for 4,096"
    assert found(made, maxPrefillTokens=256).low == made.kv_tokens
    plain = sees.size(inputs_of({**GIVEN, "modalities": ["text"]}, True), 2048)
    assert plain is not None and "modalities" not in fields(plain, before, 16)
    assert found(plain, modalities=["text"]) == found(plain, modalities=None) == found(plain)
    before["engine"]["modalities"] = ["text"]
    assert found(plain, modalities=["text", "image"]) == Bounds(0, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefixSnapshots", 32),
        ("kvCacheDtype", "fp8"),
        ("stateDtype", "bfloat16"),
        ("modalities", ["text"]),
    ],
)
def test_what_sets_how_many_requests_run_has_no_bound_where_each_has_a_state(
    field: str, value: object
) -> None:
    hybrid = replace(CPU, gpu=True, state=12 << 20)
    before = inputs_of({**GIVEN, "maxRunningRequests": None}, True)
    made = hybrid.size(before, 2048)
    assert made is not None
    after = {**before, "engine": {**before["engine"], field: value}}
    assert bounds(made, before, after) == Bounds(0, None)
    assert not {"prefixSnapshots", "kvCacheDtype", "stateDtype"} & set(fields(made, before, 8))
    asked = {**after, "engine": {**after["engine"], "maxRunningRequests": made.sequences}}
    assert bounds(made, before, asked).high is not None, "then as many run as before"


def test_memory_of_the_host_sets_no_number_of_requests_on_a_gpu() -> None:
    made, inputs = gemma(8192, running=None)
    after = {**inputs, "resources": {**inputs["resources"], "memory": "32Gi"}}
    assert bounds(made, inputs, after).low == made.kv_tokens
