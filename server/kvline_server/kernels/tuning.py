"""Which kernel each GEMM takes, kept from one start to the next of the same pod.

Pure values and one small file; the trials themselves are kernels/gemm.py's.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

Shape = tuple[int, int, int]  # rows, out, in
Choices = dict[Shape, int]  # a kernel's number, for the shapes that have a better one than torch's

FEW = (1, 2, 4, 8)
DECODES = (64, 128, 192, 256)
LOADED = (1024, 2048, 3072)  # many decodes and some prompts, in whole waves
MAX_BYTES = 1 << 20


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    choices: list[tuple[int, int, int, int]]


def trial_rows(max_rows: int) -> list[int]:
    """Row counts worth a trial at every start: small batches, decoding, a server under load, full
    prompt chunks. More gained nothing that was worth its time (docs/performance.md, GEMMs)."""
    return sorted(n for n in {*FEW, *DECODES, *LOADED, max_rows} if n <= max_rows)


def read(path: Path, key: str) -> Choices | None:
    """The choices of an earlier start with this key; None when there are none to be trusted."""
    try:
        found = msgspec.json.decode(path.read_bytes()[:MAX_BYTES], type=_File)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if found.key != key:
        return None
    return {(rows, out, inner): choice for rows, out, inner, choice in found.choices}


def write(path: Path, key: str, choices: Choices) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    rows = [(*shape, choice) for shape, choice in sorted(choices.items())]
    part.write_bytes(msgspec.json.encode(_File(key, rows)))
    part.replace(path)
