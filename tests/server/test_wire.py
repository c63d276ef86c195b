"""Steps pass between ranks unchanged, in shared memory of a size that holds any of them."""

from __future__ import annotations

import mmap
import os
import runpy
from dataclasses import fields, is_dataclass, make_dataclass, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvline_server.engine.stress.bounds import Bounds
from kvline_server.engine.stress.owners import StressSet
from kvline_server.kernels.layout import GroupLayout, Layout, SamplingMetadata
from kvline_server.memory.pages import pages_for
from kvline_server.parallel import wire
from kvline_server.parallel.record import Record
from kvline_server.worker.step import NO_CONSTRAINTS, Constraints, LogitsEdits, Step

STEP = Record(Step)


def values(declared: Any) -> st.SearchStrategy[Any]:
    """Any value of a field: arrays of any bits, so NaN and extremes too."""
    if declared is int:
        return st.integers(-(1 << 63), (1 << 63) - 1)
    if get_origin(declared) is np.ndarray:
        (kind,) = get_args(get_args(declared)[1])
        size = np.dtype(kind).itemsize
        bits = st.binary(max_size=40 * size)
        return bits.map(lambda each: np.frombuffer(each[: len(each) // size * size], kind))
    if get_origin(declared) is tuple:
        return st.lists(values(get_args(declared)[0]), max_size=2).map(tuple)
    if get_origin(declared) is UnionType:
        return st.one_of(*(st.none() if a is NoneType else values(a) for a in get_args(declared)))
    if isinstance(declared, type) and is_dataclass(declared):
        hints = get_type_hints(declared)
        return st.builds(declared, **{name: values(hint) for name, hint in hints.items()})
    return st.sampled_from(declared)


def arrays(value: object) -> list[np.ndarray]:
    """All, of a step or one of its fields."""
    if isinstance(value, np.ndarray):
        return [value]
    each = value if isinstance(value, tuple) else []
    if is_dataclass(value):
        each = [getattr(value, field.name) for field in fields(value)]
    return [array for item in each for array in arrays(item)]


def flat(value: object) -> Any:
    """Whatever of it can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    if is_dataclass(value):
        return type(value), {each.name: flat(getattr(value, each.name)) for each in fields(value)}
    return type(value), value


@given(st.lists(values(Step), min_size=1, max_size=4))
def test_a_step_is_read_as_it_was_written(made: list[Step]) -> None:
    memory = memoryview(bytearray(1 << 16))
    for step in made:  # each over the one before
        STEP.write(memory, step)
        assert flat(STEP.read(memory)) == flat(step)


@given(values(Step))
def test_there_is_room_for_arrays_of_so_many_entries(step: Step) -> None:
    masks = Constraints(masks=step.constraints.masks)
    of_step = max(len(array) for array in arrays(replace(step, constraints=masks)))
    edits, groups = (
        [max(len(array) for array in arrays(item)) for item in items]
        for items in (step.constraints.logits_edits, step.layout.groups)
    )
    room = STEP.size(of_step) + sum(Record(LogitsEdits).size(most) for most in edits)
    room += sum(Record(GroupLayout).size(most) for most in groups)
    STEP.write(memoryview(bytearray(room)), step)


@pytest.mark.parametrize(
    "declared",
    [
        np.ndarray,
        NDArray[Any],
        list[int],
        str,
        float,
        tuple[str, ...],
        tuple[LogitsEdits, SamplingMetadata],
        tuple[()],
    ],
)
def test_a_field_of_no_declared_type_is_an_error_at_import(
    monkeypatch: pytest.MonkeyPatch, declared: Any
) -> None:
    wrong = make_dataclass("Wrong", [("rows", int), ("tokens", declared)])
    monkeypatch.setattr("kvline_server.worker.step.Step", wrong)
    with pytest.raises(TypeError, match=r"Wrong.tokens is declared as .*: not an array of a named"):
        runpy.run_path(wire.__file__)


def test_what_is_read_is_the_memory_itself() -> None:
    step = small()
    memory = memoryview(bytearray(1 << 14))
    STEP.write(memory, step)
    shared = np.frombuffer(memory, np.uint8)
    again = STEP.read(memory)
    assert all(np.shares_memory(each, shared) for each in arrays(again) if len(each))


def small() -> Step:
    one, row = np.ones(1, np.int64), np.ones(1, np.int32)
    some = np.ones(1, np.float32)
    starts = np.array([0, 1], np.int32)
    layout = Layout(1, starts, row, (GroupLayout(row, starts, row, one, one),))
    metadata = SamplingMetadata(some, row, some, some, np.ones(1, np.uint64))
    return Step(one, layout, one[:0], one[:0], one, one[:0], 0, one, metadata, one[:0], 0)


@pytest.mark.parametrize("aliased", [1 << 20, 0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    ("rows", "running", "length", "vocabulary"),
    [(64, 4, 256, 307), (16, 16, 4096, 32), (512, 1, 16, 307), (2048, 300, 40, 1000)],
)
def test_the_largest_steps_fit(
    rows: int, running: int, length: int, vocabulary: int, ranks: int, aliased: int
) -> None:
    room = wire.step_bytes(rows, running, length, vocabulary, ranks, 1)
    pages = running * pages_for(length) + 1 if not aliased else 65
    bounds = Bounds(
        max_running_requests=running,
        max_prefill_tokens=rows,
        max_top_logprobs=20,
        max_model_len=length,
        vocabulary=vocabulary,
        windows=(0,),
        pages=(pages,),
        logprob_rows=16,
        ranks=ranks,
        aliased=aliased,
    )
    memory = memoryview(bytearray(room))
    for play in StressSet().plays(bounds):
        step = play.make().step
        STEP.write(memory, step)
        end = STEP.write(memory, replace(step, constraints=NO_CONSTRAINTS))
        Record(Constraints).write(memory[end:], step.constraints)


def test_a_step_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer"):
        STEP.write(memoryview(bytearray(300)), small())


def test_what_large_steps_took_is_given_back() -> None:
    """A step with penalties may take some GiB, of which the next ones use little."""
    file = os.memfd_create("steps")
    writer, reader = (wire.Steps(file, 1 << 20, 2, 1) for _ in range(2))
    large = replace(small(), listed=np.ones(100_000, np.int64))

    def taken() -> int:
        return os.fstat(file).st_blocks * 512

    for _ in range(2):
        buffer = writer.write(large, lambda: None)
    reader.has_read(0)
    writer.trim()
    assert flat(reader.read(buffer)) == flat(large), "it is still to be read"
    assert taken() > 2 * large.listed.nbytes
    reader.has_read(0)
    writer.trim()
    assert taken() <= mmap.PAGESIZE, "the readers' counts"
    buffer = writer.write(small(), lambda: None)
    assert flat(reader.read(buffer)) == flat(small())
    assert taken() <= 2 * mmap.PAGESIZE
    os.close(file)


def test_a_slot_is_written_again_once_all_have_read_it() -> None:
    file = os.memfd_create("steps")
    writer, *readers = (wire.Steps(file, 4096, 2, 2) for _ in range(3))
    waited: list[int] = []

    def never() -> None:
        raise AssertionError("there is a free buffer")

    def wait() -> None:
        waited.append(1)
        readers[len(waited) - 1].has_read(len(waited) - 1)

    assert writer.write(small(), never) == 0
    assert writer.write(small(), never) == 1
    assert flat(readers[1].read(1)) == flat(small())
    assert writer.write(small(), wait) == 0
    assert len(waited) == 2, "one of the two readers is not enough"
    os.close(file)
