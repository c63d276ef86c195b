"""What a revision's pods serve of images, of spec.engine.modalities and its bounds. Pure."""

from __future__ import annotations

from typing import Any

from kvline_contract.launch import Images
from kvline_operator.api.modalities import BOUNDS, FIELD, Modality
from kvline_operator.errors import SpecError

Object = dict[str, Any]


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
