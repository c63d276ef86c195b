"""Kubernetes quantities in the form that the API server gives them, so that `2`, "2" and "2000m"
are one setting and one revision."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import chain
from typing import Any

from kvline_operator.errors import SpecError

QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?", re.ASCII)
DECIMAL = {"P": 10**15, "T": 10**12, "G": 10**9, "M": 10**6, "k": 1000, "": 1}
BINARY = {"Pi": 1 << 50, "Ti": 1 << 40, "Gi": 1 << 30, "Mi": 1 << 20, "Ki": 1 << 10, "": 1}


def canonical(value: str | int, field: str) -> str:
    """The largest suffix of the same kind that leaves a whole number; thousandths at least."""
    match = QUANTITY.fullmatch(str(value))
    if match is None:
        raise SpecError(f"{field} must be a quantity such as 2, 500m or 1.5Gi, got {value!r:.80}")
    suffix = match[2] or ""
    one = Fraction(1, 1000) if suffix == "m" else {**DECIMAL, **BINARY}[suffix]
    thousandths = -(-Fraction(match[1]) * one * 1000 // 1)
    amount, rest = divmod(thousandths, 1000)
    if rest:
        return f"{thousandths}m"
    kinds = BINARY if suffix.endswith("i") else DECIMAL
    found = ((amount // size, name) for name, size in kinds.items() if amount % size == 0)
    number, name = next(chain(found, [(amount, "")]))
    return f"{number}{name}" if amount else "0"


def comparable(value: Any) -> Any:
    """The canonical form of a quantity; what is none as it is."""
    try:
        return canonical(value, "")
    except SpecError:
        return value


def in_bytes(value: str | int, field: str) -> int:
    """A part of a byte counts as one."""
    match = QUANTITY.fullmatch(canonical(value, field))
    assert match is not None, "canonical"
    if match[2] == "m":
        return -(-int(match[1]) // 1000)
    return int(match[1]) * {**DECIMAL, **BINARY}[match[2] or ""]
