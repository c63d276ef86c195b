"""Steps pass between ranks unchanged, in shared memory of a size that holds any of them."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_server.engine.largest_steps import LargestSteps
from kvline_server.kernels.layout import Draws, Layout
from kvline_server.kernels.routing import Played
from kvline_server.memory.pages import pages_for
from kvline_server.parallel import wire
from kvline_server.worker.step import Edits, Step


def array(kind: type, size: int, seed: int) -> np.ndarray:
    """Any bits, so NaN and extremes too."""
    bits = np.random.default_rng(seed).bytes(size * np.dtype(kind).itemsize)
    return np.frombuffer(bits, kind)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    seeds = iter(range(draw(st.integers(0, 1 << 30)), 1 << 62))
    sizes = st.integers(0, 40)

    def of(kind: type, size: int) -> np.ndarray:
        return array(kind, size, next(seeds))

    def edits(size: int) -> Edits:
        kinds = (np.int64, np.int64, np.float32, np.float32)
        return Edits(*(of(kind, size) for kind in kinds))

    i8, i4, f4 = np.int64, np.int32, np.float32
    rows, sequences, sampled = draw(sizes), draw(sizes), draw(sizes)
    return Step(
        tokens=of(i8, rows),
        layout=Layout(
            draw(sizes),
            of(i4, sequences + 1),
            of(i4, sequences),
            of(i4, sequences + 1),
            of(i4, draw(sizes)),
            of(i4, rows),
            of(i8, rows),
        ),
        pending_rows=of(i8, draw(sizes)),
        pending_slots=of(i8, draw(sizes)),
        wanted=of(i8, draw(sizes)),
        targets=of(i8, draw(sizes)),
        scored_top=draw(st.integers(0, 20)),
        sampled_slots=of(i8, sampled),
        draws=Draws(
            of(f4, sampled),
            of(i4, sampled),
            of(f4, sampled),
            of(f4, sampled),
            of(np.uint64, sampled),
        ),
        edits=tuple(edits(draw(sizes)) for _ in range(draw(st.integers(0, 2)))),
        listed=of(i8, draw(sizes)),
        listed_top=draw(st.integers(0, 20)),
        cleared=of(i8, draw(sizes)),
        routing=draw(st.sampled_from(Played)),
    )


def flat(step: Step) -> list[tuple[str, bytes]]:
    return [(str(array.dtype), array.tobytes()) for array in wire._arrays(step)]


def numbers(step: Step) -> list[int]:
    layout, edits = step.layout, len(step.edits)
    return [layout.decodes, step.scored_top, step.listed_top, step.routing, edits]


@given(st.lists(steps(), min_size=1, max_size=4))
def test_a_step_is_read_as_it_was_written(made: list[Step]) -> None:
    memory = memoryview(bytearray(1 << 16))
    for step in made:  # each over the one before
        wire.write(memory, step)
        again = wire.read(memory)
        assert flat(again) == flat(step) and numbers(again) == numbers(step)
        assert len(again.edits) == len(step.edits)


def test_what_is_read_is_the_memory_itself() -> None:
    step = small()
    memory = memoryview(bytearray(1 << 14))
    wire.write(memory, step)
    shared = np.frombuffer(memory, np.uint8)
    again = wire.read(memory)
    assert all(np.shares_memory(each, shared) for each in wire._arrays(again) if len(each))


def small() -> Step:
    one, row = np.ones(1, np.int64), np.ones(1, np.int32)
    some = np.ones(1, np.float32)
    layout = Layout(1, np.array([0, 1], np.int32), row, np.array([0, 1], np.int32), row, row, one)
    draws = Draws(some, row, some, some, np.ones(1, np.uint64))
    return Step(one, layout, one[:0], one[:0], one, one[:0], 0, one, draws, (), one[:0], 0, one)


@pytest.mark.parametrize("aliased", [1 << 20, 0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    ("rows", "running", "length", "vocabulary"),
    [(64, 4, 256, 307), (16, 16, 4096, 32), (512, 1, 16, 307), (2048, 300, 40, 1000)],
)
def test_the_largest_steps_fit(
    rows: int, running: int, length: int, vocabulary: int, ranks: int, aliased: int
) -> None:
    room = wire.step_bytes(rows, running, length, vocabulary, ranks)
    pages = running * pages_for(length) + 1 if not aliased else 65
    stress = LargestSteps(
        max_running_requests=running,
        max_prefill_tokens=rows,
        max_top_logprobs=20,
        max_model_len=length,
        vocabulary=vocabulary,
        pages=pages,
        logprob_rows=16,
        ranks=ranks,
        aliased=aliased,
    )
    memory = memoryview(bytearray(room))
    for _, make in stress.makers():
        wire.write(memory, make(Played.NOTHING).step)


def test_a_step_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer"):
        wire.write(memoryview(bytearray(300)), small())


def test_what_large_steps_took_is_given_back() -> None:
    """A step with penalties may take some GiB, of which the next ones use little."""
    file = os.memfd_create("steps")
    writer, reader = (wire.Steps(file, 1 << 20, 2, 1) for _ in range(2))
    large = replace(small(), listed=np.ones(100_000, np.int64))

    def taken() -> int:
        return os.fstat(file).st_blocks * 512

    for _ in range(2):
        slot = writer.write(large, lambda: None)
    reader.has_read(0)
    writer.trim()
    assert flat(reader.read(slot)) == flat(large), "it is still to be read"
    assert taken() > 2 * large.listed.nbytes
    reader.has_read(0)
    writer.trim()
    assert taken() <= mmap.PAGESIZE, "the readers' counts"
    slot = writer.write(small(), lambda: None)
    assert flat(reader.read(slot)) == flat(small())
    assert taken() <= 2 * mmap.PAGESIZE
    os.close(file)


def test_a_slot_is_written_again_once_all_have_read_it() -> None:
    file = os.memfd_create("steps")
    writer, *readers = (wire.Steps(file, 4096, 2, 2) for _ in range(3))
    waited: list[int] = []

    def never() -> None:
        raise AssertionError("there is a free slot")

    def wait() -> None:
        waited.append(1)
        readers[len(waited) - 1].has_read(len(waited) - 1)

    assert writer.write(small(), never) == 0
    assert writer.write(small(), never) == 1
    assert flat(readers[1].read(1)) == flat(small())
    assert writer.write(small(), wait) == 0
    assert len(waited) == 2, "one of the two readers is not enough"
    os.close(file)
