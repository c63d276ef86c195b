"""spec.engine.modalities: whether requests may have images. Pure.

An absent field is what the stable revision serves, and for a new service images where the server
has an encoder for them, unless spec.image may name a server of before images. So the field alone
does not tell what pods do; each revision keeps that as its `images`, a
kvline_contract.launch.Images, or None for text alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kvline_operator.errors import SpecError

Object = dict[str, Any]
NAME = "modalities"
FIELD = f"spec.engine.{NAME}"
BOUNDS = ("maxImagesPerRequest", "maxImagePatches")


class Modality(StrEnum):
    TEXT = "text"
    IMAGE = "image"


def check(engine: Object) -> None:
    """Of spec.engine, for specs of another CRD than the operator's. Raises SpecError."""
    given = engine.get("modalities")
    if given is None:
        return
    known, found = set(Modality), given if isinstance(given, list) else [given]
    if not set(map(str, found)) <= known or str(Modality.TEXT) not in found:
        raise SpecError(f"{FIELD} must be [text] or [text, image], got {given!r:.80}")


def ordered(given: list[str]) -> list[str]:
    """Each once and text first, so that two orders are one revision."""
    return sorted(set(given), key=lambda each: (each != Modality.TEXT, each))
