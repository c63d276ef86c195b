"""What a failed start says: every MiB by name, and values that are measured. A.4 of issue 33."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from simulated import BYTES_PER_TOKEN, SETTINGS, Gpu, Killed, Machine
from test_profile import Start, machine

from kvline_contract.memory import KV_CACHE, OTHERS, RUNTIME, Memory
from kvline_contract.report import Direction, Knob
from kvline_server.errors import ContextDoesNotFit, OutOfMemory, SizingError
from kvline_server.memory.device import MIB
from kvline_server.sizing.advice import Point, extrapolated
from kvline_server.sizing.breakdown import Taken, needed, sentence, whole
from kvline_server.sizing.offers import Offer, advice, best, doubled
from kvline_server.sizing.settings import EngineSettings

SETTING = {
    "spec.engine.maxPrefillTokens": "max_prefill_tokens",
    "spec.engine.maxRunningRequests": "max_running_requests",
    "spec.engine.maxModelLen": "max_model_len",
    "spec.capacity.headroomMiB": "headroom_mib",
    "spec.capacity.kvTokens": "pinned_kv_tokens",
}


def fails(made: Machine, folder: Path, wanted: EngineSettings = SETTINGS) -> SizingError:
    with pytest.raises((OutOfMemory, ContextDoesNotFit)) as caught:
        Start(made, folder, wanted).run()
    return caught.value


def named(message: str, total: int) -> dict[str, int]:
    """MiB by part, of the one list in a message."""
    (found,) = re.findall(rf"of {total} MiB ((?:[-\w]+ \d+ MiB(?:, )?)+)", message)
    return {part: int(mib) for part, mib in re.findall(r"([-\w]+) (\d+) MiB", found)}


def names_every_mib(error: SizingError) -> None:
    """In its message, as in its parts."""
    parts = named(str(error), 256)
    missing = re.search(r"\((\d+) MiB more than there are\)", str(error))
    assert sum(parts.values()) - (int(missing[1]) if missing else 0) == 256
    memory = error.termination().memory
    assert memory is not None and memory.parts is not None
    assert {part.name: part.mib for part in memory.parts if part.mib > 0} == parts
    assert "others" not in parts


def tokens_offered(message: str, knob: Knob) -> int:
    unit = "Mi" if knob.spec_field == "spec.resources.memory" else ""
    text = rf"{re.escape(knob.spec_field)} {knob.value}{unit} would leave ([\d,]+) tokens"
    (found,) = re.findall(text, message)
    return int(found.replace(",", ""))


def apply(made: Callable[..., Machine], wanted: EngineSettings, knob: Knob, folder: Path) -> int:
    """Starts with the advice. -> tokens"""
    assert knob.value is not None
    folder.mkdir(exist_ok=True)
    if knob.spec_field == "spec.resources.memory":
        return Start(made(limit=knob.value * MIB), folder, wanted).run().kv_tokens
    changed = wanted.changed(**{SETTING[knob.spec_field]: knob.value})
    return Start(made(), folder, changed).run().kv_tokens


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"weights": 60 * MIB, "price": 2 * MIB}, {}),
    "headroom": ({"weights": 230 * MIB}, {"headroom_mib": 20}),
    "clients": ({"weights": 60 * MIB}, {"client_bytes": 200 * MIB, "model_max_len": 1 << 17}),
    "context": ({"weights": 100 * MIB}, {"max_model_len": 40_000, "model_max_len": 40_000}),
    "long context": (
        {"weights": 100 * MIB, "context_price": 8 << 10},
        {"max_model_len": 20_000, "model_max_len": 40_000},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_value_that_a_failed_start_names_is_one_with_which_it_starts(
    tmp_path: Path, case: str
) -> None:
    changed, values = CASES[case]
    wanted = replace(SETTINGS, **values)

    def made(**more: Any) -> Machine:
        return machine(**(changed | more))

    error = fails(made(), tmp_path, wanted)
    knobs = error.termination().knobs
    assert "spec.resources.memory" in {knob.spec_field for knob in knobs}
    for number, knob in enumerate(knobs):
        got = apply(made, wanted, knob, tmp_path / str(number))
        if not (isinstance(error, ContextDoesNotFit) and knob.spec_field.endswith("maxModelLen")):
            offered = tokens_offered(str(error), knob)
            assert offered <= got, knob
        assert got >= (wanted.max_model_len or 32) or knob.spec_field.endswith("maxModelLen")


@pytest.mark.parametrize("case", CASES)
def test_a_failed_start_names_every_mib(tmp_path: Path, case: str) -> None:
    changed, values = CASES[case]
    error = fails(machine(**changed), tmp_path, replace(SETTINGS, **values))
    names_every_mib(error)


def test_a_setting_that_cannot_help_is_not_offered(tmp_path: Path) -> None:
    """Weights leave nothing, whatever a step takes."""
    error = fails(machine(weights=252 * MIB, price=0), tmp_path)
    assert [knob.spec_field for knob in error.termination().knobs] == ["spec.resources.memory"]
    small = fails(Gpu(256 * MIB, 254 * MIB, 0), tmp_path)
    assert not small.termination().knobs and "take a GPU with more memory" in str(small)


def test_the_example_of_the_issue(tmp_path: Path) -> None:
    """«maxPrefillTokens 128 would leave 4,100 tokens»: the largest that leaves enough for use."""
    wanted = replace(SETTINGS, max_prefill_tokens=512, model_max_len=1 << 17)
    price = 300 << 10
    left = 128 * price + 4100 * BYTES_PER_TOKEN + (8 + 3) * MIB
    made = machine(weights=256 * MIB - left, price=price)
    error = fails(made, tmp_path, wanted)
    assert re.search(r"spec\.engine\.maxPrefillTokens 64 would leave 8,8\d\d tokens", str(error))
    shorter = fails(made, tmp_path, replace(wanted, model_max_len=4000))
    assert re.search(r"spec\.engine\.maxPrefillTokens 128 would leave 4,0\d\d tokens", str(shorter))


def test_a_pin_names_the_size_that_would_survive(tmp_path: Path) -> None:
    wanted = replace(SETTINGS, pinned_kv_tokens=60_000)
    error = fails(machine(), tmp_path, wanted)
    pin, memory = error.termination().knobs
    assert (pin.spec_field, pin.direction) == ("spec.capacity.kvTokens", Direction.LOWER)
    assert 30_000 < apply(machine, wanted, pin, tmp_path / "pin") == pin.value
    assert apply(machine, wanted, memory, tmp_path / "memory") == 60_000


@pytest.mark.parametrize("again", [False, True], ids=["plays", "is killed while it plays"])
def test_a_pin_that_was_killed_names_the_size_that_would_survive(
    tmp_path: Path, again: bool
) -> None:
    """A kill is how a size fails on a CPU; one more than that leaves the diagnosis."""
    wanted = replace(SETTINGS, pinned_kv_tokens=60_000)

    def made(price: int = 64 << 10) -> Machine:
        return machine(kills=True, price=price)

    with pytest.raises(Killed):
        Start(made(), tmp_path, wanted).run()
    if again:
        with pytest.raises(Killed):
            Start(made(2 * MIB), tmp_path, wanted).run()
    error = fails(made(), tmp_path, wanted)
    assert "pins 60000 tokens, which did not survive" in str(error)
    pin = next(k for k in error.termination().knobs if k.direction is Direction.LOWER)
    assert pin.spec_field == "spec.capacity.kvTokens" and (pin.value is None) == again
    if not again:
        assert 30_000 < apply(made, wanted, pin, tmp_path / "pin") == pin.value


def test_a_kill_while_advice_is_measured_leaves_the_diagnosis(tmp_path: Path) -> None:
    """A step of other settings may be killed too: the next start says what it knows."""

    class Fragile(Machine):
        def launch(self, step: Any) -> Machine:
            raise Killed

    made = Fragile(256 * MIB, 100 * MIB, 0, kills=True)
    wanted = replace(SETTINGS, max_model_len=512)
    for _ in range(3):  # two probes, and what was to be advice
        with pytest.raises(Killed):
            Start(made, tmp_path, wanted).run()
    error = fails(made, tmp_path, wanted)
    assert "killed for memory while probing" in str(error)
    assert [k.value for k in error.termination().knobs] == [None, None]
    parts = named(str(error), 256)
    assert sum(parts.values()) == 256 and parts["activations"] > 100
    with pytest.raises(Killed):  # who fixes the cause outside needs no new state folder
        Start(made, tmp_path, wanted).run()


def test_a_probe_that_was_killed_is_advised_by_smaller_steps(tmp_path: Path) -> None:
    wanted = replace(SETTINGS, max_model_len=512, max_prefill_tokens=512)

    def made(**more: Any) -> Machine:
        return machine(**({"price": MIB, "kills": True} | more))

    for _ in range(2):
        with pytest.raises(Killed):
            Start(made(), tmp_path, wanted).run()
    error = fails(made(), tmp_path, wanted)
    memory, prefill = error.termination().knobs
    assert prefill.value == 128
    for number, knob in enumerate((memory, prefill)):
        assert apply(made, wanted, knob, tmp_path / str(number)) >= 512


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    weights=st.integers(1, 300),
    price=st.integers(0, 4 << 20),
    context_price=st.integers(0, 16 << 10),
    running=st.sampled_from([1, 4, 16]),
    asked=st.sampled_from([None, 600, 5000]),
)
@example(  # the second row count is played with a shorter context than the first
    weights=143, price=2_097_153, context_price=7354, running=4, asked=None
)
def test_whatever_the_machine_advice_starts_and_parts_add_up(
    tmp_path: Path, weights: int, price: int, context_price: int, running: int, asked: int | None
) -> None:
    wanted = replace(
        SETTINGS, max_running_requests=running, max_model_len=asked, model_max_len=5000
    )

    def made(**more: Any) -> Machine:
        changed = {"weights": weights * MIB, "price": price, "context_price": context_price}
        return machine(**(changed | more))

    folder = tmp_path / "first"
    folder.mkdir(exist_ok=True)
    (folder / "attempts.json").unlink(missing_ok=True)
    try:
        Start(made(), folder, wanted).run()
        return
    except (OutOfMemory, ContextDoesNotFit) as failed:
        error = failed
    names_every_mib(error)
    for knob in error.termination().knobs:
        if f"{knob.spec_field} {knob.value}" in str(error):
            (tmp_path / "again" / "attempts.json").unlink(missing_ok=True)
            got = apply(made, wanted, knob, tmp_path / "again")
            assert got >= tokens_offered(str(error), knob) and got >= 32


def test_the_best_value_is_the_largest_that_leaves_enough() -> None:
    tokens = {16: 9000, 32: 8000, 64: 5000, 128: 4000, 256: 100}
    played: list[int] = []

    def leaves(value: int) -> int:
        played.append(value)
        return tokens[value]

    values = doubled(16, 512)
    assert best(values, leaves, lambda _: 32, 4096) == (64, 5000)
    assert played == [16, 32, 64, 128]  # and nothing larger
    assert best(values, leaves, lambda _: 32, 10_000) == (16, 9000)
    assert best(values, leaves, lambda _: 9001, 10_000) is None
    assert best(values, lambda _: None, lambda _: 32, 4096) is None
    assert doubled(1, 16, 4) == [1, 4] and doubled(16, 16) == []


def test_what_offers_say() -> None:
    memory = Offer.of_memory(1301, 1024)
    assert str(memory) == "spec.resources.memory 1312Mi would leave 1,024 tokens"
    assert str(Offer.of_memory(1301, None)) == "raise spec.resources.memory to 1312Mi at least"
    lower = Offer.lower("spec.engine.maxPrefillTokens", 128, 4100)
    assert advice((memory, lower)).endswith(
        " tokens; or spec.engine.maxPrefillTokens 128 would leave 4,100 tokens"
    )
    unknown = Offer(Knob("spec.engine.maxPrefillTokens", Direction.LOWER))
    assert str(unknown).startswith("lower spec.engine.maxPrefillTokens, by how much could not")


@given(st.lists(st.integers(0, 1 << 32), min_size=1, max_size=8), st.integers(1 << 20, 1 << 35))
def test_parts_add_up_whatever_was_measured(sizes: list[int], total: int) -> None:
    parts = [Taken(f"part-{i}", nbytes) for i, nbytes in enumerate(sizes)]
    for memory in (whole(total, parts, "rest"), needed(total, parts)):
        assert isinstance(memory, Memory)  # which checks the sum
        assert memory.mib(OTHERS) <= 0
        assert all(part.detail for part in memory.parts if part.name == OTHERS and part.mib)
    exact = needed(total, parts)
    short = (sum(sizes) >> 20) - (total >> 20)
    assert (exact.mib(KV_CACHE), -exact.mib(OTHERS)) == (max(0, -short), max(0, short))
    assert whole(total, [], "rest").mib(RUNTIME) == total >> 20


def test_a_list_of_parts_says_what_is_missing() -> None:
    memory = needed(100 * MIB, [Taken("weights", 90 * MIB), Taken("activations", 30 * MIB)])
    text = "of 100 MiB weights 90 MiB, activations 30 MiB (20 MiB more than there are)"
    assert sentence(memory) == text


def test_a_growth_is_a_line_through_what_was_played_beside_like_contexts() -> None:
    def grows(*points: tuple[int, int, int]) -> float:
        return extrapolated([Point(*each) for each in points], 8192) / MIB

    assert grows((16, 5000, 64 * MIB), (32, 5000, 65 * MIB)) == 65 + 510
    assert grows((16, 5000, 64 * MIB), (32, 4984, 65 * MIB)) == 65 + 510  # a page shorter
    assert grows((16, 5000, 64 * MIB), (32, 1024, 65 * MIB)) == 65 * 256  # nothing to compare
    assert grows((16, 5000, 640 * MIB), (32, 1024, 2 * MIB)) == 640
    assert grows() == 0
