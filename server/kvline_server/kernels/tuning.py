"""The autotuner's choices per GEMM shape: cached in a file for later starts of the same pod, and as
texts in the record of its size for starts of identical replicas.

kernels/formats.py measures them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

Shape = tuple[int, int, int]  # rows, out, in
# Kernel by shape: where one is faster than torch's, and of fp8 weights for all that were tried.
Choices = dict[Shape, int]

MAX_BYTES = 1 << 20


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    choices: list[tuple[int, int, int, int]]


def known(path: Path, key: str, recorded: Iterable[str]) -> tuple[Choices | None, str]:
    """The choices of an earlier start of this pod, else of its size's record, and where they are
    from; None where they are to be measured."""
    if (found := read(path, key)) is not None:
        return found, "cached by an earlier start"
    if (found := parse(recorded)) is not None:
        return found, "recorded by an identical replica"
    return None, "measured now"


def read(path: Path, key: str) -> Choices | None:
    """The choices of an earlier start with this key; None if there are none, or no valid file."""
    try:
        found = msgspec.json.decode(path.read_bytes()[:MAX_BYTES], type=_File)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if found.key != key:
        return None
    return {(rows, out, inner): choice for rows, out, inner, choice in found.choices}


def texts(choices: Choices) -> tuple[str, ...]:
    """For the sizing report: rows, output width, input width and kernel number of each."""
    return tuple(" ".join(map(str, (*shape, choice))) for shape, choice in sorted(choices.items()))


def parse(found: Iterable[str]) -> Choices | None:
    """The choices of such texts; None if there are none, or an invalid one."""
    out: Choices = {}
    try:
        for text in found:
            rows, wide, inner, choice = map(int, text.split())
            out[rows, wide, inner] = choice
    except ValueError:
        return None
    return out or None


def write(path: Path, key: str, choices: Choices) -> None:
    """Writes the file atomically."""
    part = path.with_suffix(".part")
    rows = [(*shape, choice) for shape, choice in sorted(choices.items())]
    part.write_bytes(msgspec.json.encode(_File(key, rows)))
    part.replace(path)
