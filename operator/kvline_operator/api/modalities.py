"""spec.engine.modalities: whether requests may have images. Pure.

An absent field is what the stable revision serves, and for a new service images where the server
has an encoder for them, unless spec.image may name a server of before images. So the field alone
does not tell what pods do; each revision keeps that as its `images`, a
kvline_contract.launch.Images, or None for text alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from kvline_contract.launch import Images
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


def images(engine: Object, absent: str | None, before: Object) -> str | None:
    """Whether pods of these inputs serve images; `absent`: where the field is. Raises SpecError
    where images are bounded and none are served, but for bounds that spec.engine of the stable
    revision, `before`, had too: it is accepted, whatever its server turned out to serve."""
    found = absent
    if (given := engine.get("modalities")) is not None:
        found = Images.REQUIRED if Modality.IMAGE in given else None
    known = before if given is None else {}
    bound = next((field for field in BOUNDS if field in engine and field not in known), None)
    if bound is None or found is not None:
        return found
    where = f"without {FIELD} this service serves" if given is None else f"{FIELD} is"
    raise SpecError(
        f"spec.engine.{bound} bounds images, and {where} text alone: set {FIELD} to [text, image], "
        "or remove the bound"
    )


def settled(inputs: Object, served: str | None) -> Object:
    """A revision's inputs with the field, where `served` is its `images`."""
    kinds = [Modality.TEXT, Modality.IMAGE] if served else [Modality.TEXT]
    return {**inputs, "engine": {**inputs.get("engine", {}), "modalities": list(map(str, kinds))}}
