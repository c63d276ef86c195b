"""The revision of a spec. Pure.

Two specs with equal inputs and image are the same revision.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kvline_contract.names import ANNOTATION_IMAGE, LABEL_REVISION
from kvline_operator.api.spec import ServiceSpec, canonical
from kvline_operator.errors import SpecError

SAFE_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # as Kubernetes uses: no vowels, so no words
LENGTH = 5
HISTORY_LIMIT = 10


@dataclass(frozen=True, slots=True)
class Revision:
    name: str  # five characters
    image: str
    inputs_json: str
    number: int  # increases with each new revision of a service
    named: bool = False  # its image is of spec.image, not the operator's default


def revision_hash(inputs_json: str, image: str, counter: int = 0) -> str:
    text = canonical([inputs_json, image, counter])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    letters = []
    for _ in range(LENGTH):
        number, index = divmod(number, len(SAFE_ALPHABET))
        letters.append(SAFE_ALPHABET[index])
    return "".join(letters)


def known(controller_revisions: list[dict[str, Any]]) -> list[Revision]:
    """The revisions in these ControllerRevisions, newest first."""
    found = []
    for item in controller_revisions:
        data = item.get("data") or {}
        found.append(
            Revision(
                name=(item["metadata"].get("labels") or {}).get(LABEL_REVISION, ""),
                image=data.get("image")
                or (item["metadata"].get("annotations") or {}).get(ANNOTATION_IMAGE, ""),
                inputs_json=canonical(data.get("inputs", {})),
                number=item.get("revision", 0),
                named=bool(data.get("imageNamed")),
            )
        )
    return sorted(found, key=lambda r: r.number, reverse=True)


def wanted(
    spec: ServiceSpec, existing: list[Revision], default_image: str, stable: str = ""
) -> Revision:
    """The revision of this spec: an existing one with equal inputs and image, else a new one.

    Without spec.image, the image is that of the stable revision if its inputs are equal, else that
    of the newest revision with equal inputs and a default image, so that a new default image
    restarts no pod and removing a wrong spec.image reverts it. Raises SpecError without any image.
    """
    existing = sorted(existing, key=lambda revision: revision.name != stable)
    unnamed = [r for r in existing if r.name == stable or not r.named]
    for revision in existing if spec.image else unnamed:
        if revision.inputs_json == spec.inputs_json and spec.image in (None, revision.image):
            return revision
    image = spec.image or _inherited_image(spec, unnamed) or default_image
    if not image:
        raise SpecError(
            f"spec.image is required: spec.resources.gpus is {spec.gpus}, and the operator was "
            "started without --default-cuda-image (the chart's image.cuda)"
        )
    taken = {revision.name for revision in existing}
    counter = 0
    while (name := revision_hash(spec.inputs_json, image, counter)) in taken:
        counter += 1
    number = max((revision.number for revision in existing), default=0) + 1
    return Revision(name, image, spec.inputs_json, number, bool(spec.image))


def _inherited_image(spec: ServiceSpec, existing: list[Revision]) -> str | None:
    """The image of the revision that annotation kvline.dev/restart restarts."""
    without = {k: v for k, v in spec.inputs.items() if k != "restart"}
    for revision in existing:
        other = {k: v for k, v in json.loads(revision.inputs_json).items() if k != "restart"}
        if other == without:
            return revision.image
    return None
