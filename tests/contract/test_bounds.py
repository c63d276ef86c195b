"""The fullest documents: within their bytes, and with lists that earlier readers accept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.codec import MAX_INTEGER, dumps, encode
from kvline_contract.launch import Record
from kvline_contract.memory import (
    FIGURES,
    HEADROOM,
    MAX_PARTS,
    OTHERS,
    STORED_PARTS,
    Memory,
    MemoryV1,
    Part,
)
from kvline_contract.report import (
    MAX_ATTEMPTS,
    MAX_GEMM_KERNELS,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_STAGES,
    MAX_START_STAGES,
    MAX_WARNINGS,
    REPORT_VERSIONS,
    Attempt,
    Binding,
    Current,
    Direction,
    Effective,
    Knob,
    Outcome,
    Provenance,
    Result,
    SizingReport,
    Source,
    Stage,
    State,
    Termination,
    summed,
)
from kvline_operator.store.capacity_status import CapacityStatus

# Of readers before version 3, which refuse a document with a longer list.
MOST_BEFORE = {"parts": 16, "stages": 32}
BYTES = 2**40  # of a device, and more than any has


def rank(letter: str = "d") -> Memory:
    """Each part that version 1 has a figure for, and as many others as there may be."""
    names = [*FIGURES, *(f"{i:x}".rjust(32, "p") for i in range(MAX_PARTS - len(FIGURES)))]
    parts = tuple(Part(name, 10**9 + i, letter * 64) for i, name in enumerate(names))
    return Memory(sum(part.mib for part in parts), parts, 255)


FAILURE = Termination(
    1,
    255,
    "n" * 64,
    "m" * 1024,
    MemoryV1.of(rank()),
    Binding.HOST_MEMORY,
    MAX_INTEGER,
    (Knob("k" * 64, Direction.RAISE, MAX_INTEGER, True),) * 8,
    (Attempt(16, MAX_INTEGER, Outcome.OUT_OF_MEMORY, -(2**31)),) * MAX_ATTEMPTS,
)


def fullest(letter: str = "d") -> SizingReport:
    """Every list at its bound and every text as long as it may be; those for people of `letter`."""
    attempt = Attempt(16, MAX_INTEGER, Outcome.OUT_OF_MEMORY, -(2**31))
    stages = (Stage("n" * 64, 10**9 + i, BYTES, letter * 256) for i in range(MAX_STAGES - 1))
    return SizingReport(
        "u" * 64,
        "p" * 253,
        "r" * 16,
        MAX_INTEGER,
        State.VALIDATED,
        "t" * 32,
        "t" * 32,
        Effective(*[MAX_INTEGER] * 9),
        (*stages, Stage("n" * 64, 10**9, BYTES, letter * 256, total_bytes=BYTES)),
        (attempt,) * MAX_ATTEMPTS,
        Result(
            MAX_INTEGER,
            MAX_INTEGER,
            Source.MEASURED,
            "f" * 64,
            MAX_INTEGER,
            MAX_INTEGER,
            MAX_INTEGER,
            "m" * 32,
            (rank(letter),) * MAX_RANKS,
            ("9" * 48,) * MAX_GEMM_KERNELS,
            "d" * 16,
            MAX_INTEGER,
            MAX_INTEGER,
            MAX_INTEGER,
            MAX_INTEGER,
            MAX_INTEGER,
            "d" * 16,
            MAX_INTEGER,
        ),
        FAILURE,
        (letter * 512,) * MAX_WARNINGS,
        Provenance(
            "g" * 128,
            "d" * 64,
            "i" * 512,
            "m" * 64,
            {f"{i:x}".rjust(64, "l"): "v" * 64 for i in range(16)},
        ),
        Current(
            MAX_START_STAGES,
            MAX_START_STAGES,
            "w" * 128,
            "s" * 32,
            MAX_INTEGER,
            MAX_INTEGER,
            "n" * 64,
            "r" * 32,
        ),
    )


def ranks(report: SizingReport) -> tuple[Memory, ...]:
    assert report.result is not None
    return report.result.ranks


def longest(value: Any, key: str) -> int:
    """Items of the longest list of this key, at any depth."""
    if isinstance(value, list):
        return max((longest(item, key) for item in value), default=0)
    if not isinstance(value, dict):
        return 0
    own = value.get(key)
    return max(
        [len(own) if isinstance(own, list) else 0, *(longest(v, key) for v in value.values())]
    )


def at_default(value: Any) -> Iterator[str]:
    """The fields, at any depth, that a document would leave out or that have nothing in them."""
    if isinstance(value, tuple):
        for item in value[-1:]:
            yield from at_default(item)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            own = getattr(value, each.name)
            if own == each.default:
                yield f"{type(value).__name__}.{each.name}"
            yield from at_default(own)


def test_the_fullest_report_has_every_field() -> None:
    """A field that is added to the documents must be added here, or the bound is not tested."""
    assert list(at_default(fullest())) == []


def test_the_fullest_report_is_within_its_bytes_and_read_again_as_it_was() -> None:
    report = fullest()
    assert longest(encode(report), "parts") == MAX_PARTS
    assert longest(encode(report), "stages") == MAX_STAGES
    text = report.dumps()
    assert json.loads(text) == {"version": REPORT_VERSIONS[-1], **encode(report)}
    assert len(text.encode()) <= MAX_REPORT_BYTES
    assert SizingReport.parse(text) == report


@pytest.mark.parametrize("letter", ["d", "\u8a9e", "\U0001f9ee"])
@pytest.mark.parametrize("version", REPORT_VERSIONS)
def test_only_what_is_for_people_is_cut_for_letters_of_more_bytes(
    version: int, letter: str
) -> None:
    text = fullest(letter).dumps(version)
    assert len(text.encode()) <= MAX_REPORT_BYTES
    found = SizingReport.parse(text)
    same = SizingReport.parse(fullest().dumps(version))
    assert [m.total_mib for m in ranks(found)] == [m.total_mib for m in ranks(same)]
    assert [[(p.name, p.mib) for p in m.parts] for m in ranks(found)] == [
        [(p.name, p.mib) for p in m.parts] for m in ranks(same)
    ]
    assert [(s.name, s.ms, s.bytes) for s in found.stages] == [
        (s.name, s.ms, s.bytes) for s in same.stages
    ]
    assert len(found.warnings) == MAX_WARNINGS and all(found.warnings)
    assert found.failure == FAILURE


@pytest.mark.parametrize("version", REPORT_VERSIONS[:-1])
def test_an_operator_of_the_version_before_accepts_what_it_is_served(version: int) -> None:
    report = fullest()
    served = json.loads(report.dumps(version))
    assert {key: longest(served, key) for key in MOST_BEFORE} == MOST_BEFORE
    found = SizingReport.parse(json.dumps(served))
    for before, after in zip(ranks(report), ranks(found), strict=True):
        assert after.total_mib == before.total_mib == sum(part.mib for part in after.parts)
        for name in FIGURES[:-1]:
            assert after.mib(name) == before.mib(name)
    for figure in ("ms", "bytes"):
        before, after = (sum(getattr(s, figure) for s in r.stages) for r in (report, found))
        assert before == after
    assert found.stages[-1] == report.stages[-1], "what runs stays last"
    assert found.stages[-2].name == OTHERS


def test_what_no_request_names_a_version_for_has_lists_that_earlier_readers_accept() -> None:
    """A record is read by servers of every image, the figures kept by the operator before."""
    report = fullest()
    assert report.result is not None
    kept = CapacityStatus.of([report])
    assert kept is not None and CapacityStatus.parse(kept.dumps()) == kept
    ended = Termination(1, 40, "n", "m", MemoryV1.of(rank()))
    for stored in (Record.of(report.result), kept, ended):
        assert longest(json.loads(dumps(stored)), "parts") == MOST_BEFORE["parts"]
    assert MemoryV1.of(rank()).upgraded().total_mib == rank().total_mib


def test_the_smallest_parts_are_others_which_name_them_where_they_have_nothing_to_say() -> None:
    small = tuple(Part(f"part-{i}", i) for i in range(11))
    figures = (Part("weights", 0), Part(HEADROOM, 0))
    few = Memory(55, (*small, *figures, Part("a", 0), Part("b", 0), Part("c", 0)))
    assert len(few.parts) == STORED_PARTS and few.stored() is few
    more = Memory(1055, (*few.parts, Part("large", 1000)))
    stored = more.stored()
    assert len(stored.parts) == STORED_PARTS and stored.total_mib == 1055
    assert stored.parts[-1] == Part(OTHERS, 0, "with part-0, a") and stored.mib("large") == 1000
    assert [part.name for part in stored.parts if part.name in FIGURES] == [
        "weights",
        HEADROOM,
        OTHERS,
    ]
    overlap = Part(OTHERS, -7, "measured at other moments")
    last = Memory(1048, (overlap, *more.parts)).stored().parts[-1]
    assert last == overlap, "-7 and three parts of nothing"


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(-99, 99)), max_size=60), st.booleans())
def test_stages_over_the_bound_are_summed_up_without_loss(
    ended: list[tuple[int, int]], running: bool
) -> None:
    """As the server adds them, one by one, and then for an operator of the version before."""
    stages = tuple[Stage, ...]()
    for number, (ms, nbytes) in enumerate(ended):
        stages = summed((*stages, Stage(f"s{number}", ms, nbytes)))
    last = [Stage("load", 5, 1, total_bytes=9)] * running
    found = summed((*stages, *last), 32)
    assert len(stages) <= MAX_STAGES and len(found) <= 32
    assert sum(s.ms for s in found) == sum(ms for ms, _ in ended) + 5 * running
    assert sum(s.bytes for s in found) == sum(n for _, n in ended) + running
    assert sum(s.name == OTHERS for s in found) == (len(ended) + running > 32)
    assert not running or found[-1] == last[0]
    kept = [int(s.name[1:]) for s in found if s.name.startswith("s")]
    assert kept == sorted(kept), "in the order in which they ended"
