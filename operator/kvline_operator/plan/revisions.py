"""The revision of a spec. Pure.

Two specs with equal inputs and image are the same revision. Without spec.image the image is the
stable revision's, with spec.upgradePolicy Latest the operator's default: so a new default image
restarts no pod unasked, and removing a wrong spec.image reverts it. Without spec.engine.modalities
it serves images where the stable revision was measured to: so no server or model that has them
loads an encoder unasked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvline_contract.launch import Images
from kvline_contract.names import ANNOTATION_IMAGE, revision_of
from kvline_operator.api.inputs import read
from kvline_operator.api.modalities import BOUNDS, NAME
from kvline_operator.api.revision_hash import revision_hash
from kvline_operator.api.spec import ServiceSpec, UpgradePolicy, canonical, gpus
from kvline_operator.errors import SpecError
from kvline_operator.plan import modalities
from kvline_operator.store.revision_state import RevisionState

HISTORY_LIMIT = 10
# Inputs that change no pod. `restart` and `upgrade` are of operators that had annotations for it.
ASKED = ("restartedAt", "restart", "upgrade")
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Revision:
    name: str  # five characters
    image: str
    inputs_json: str
    number: int  # increases with each new revision of a service
    named: bool = False  # its image is of spec.image, not the operator's default
    # Whether its pods serve images, as of kvline_contract.launch.Images; None: text alone
    images: str | None = None
    sees: bool | None = None  # whether its replicas had an encoder; None: none was measured

    @property
    def served(self) -> str | None:
        """Its `images`, as they turned out where that is known."""
        if self.images != Images.IF_SERVED or self.sees is None:
            return self.images
        return Images.REQUIRED if self.sees else None

    @property
    def inputs(self) -> Object:
        """A fresh copy of its inputs."""
        return dict(json.loads(self.inputs_json))

    @property
    def settled(self) -> Object:
        """Its inputs with what an absent spec.engine.modalities came to mean."""
        return modalities.settled(self.inputs, self.served)


def known(
    controller_revisions: list[dict[str, Any]], states: Mapping[str, RevisionState] | None = None
) -> list[Revision]:
    """The revisions in these ControllerRevisions, newest first. `states`: what is stored of each,
    by name."""
    found = []
    for item in controller_revisions:
        data = item.get("data") or {}
        name = revision_of(item)
        found.append(
            Revision(
                name=name,
                image=data.get("image")
                or (item["metadata"].get("annotations") or {}).get(ANNOTATION_IMAGE, ""),
                inputs_json=canonical(read(data.get("inputs", {}))),
                number=item.get("revision", 0),
                named=bool(data.get("imageNamed")),
                images=data.get("images"),
                sees=has_encoder((states or {}).get(name)),
            )
        )
    return sorted(found, key=lambda r: r.number, reverse=True)


def has_encoder(state: RevisionState | None) -> bool | None:
    """Whether its replicas had an encoder of images, as last served; None: none is stored."""
    served = None if state is None else state.capacity
    return None if served is None else served.memory.upgraded().has_encoder


def wanted(
    spec: ServiceSpec,
    existing: list[Revision],
    default_image: str,
    stable: str = "",
    tried: Collection[str] = (),
) -> Revision:
    """The revision of this spec: an existing one with equal inputs and image, else a new one.
    `stable` is the one that was accepted last, `tried` are those that ran beside it, as plan/phase
    has them. Raises SpecError without any image."""
    newest_first = sorted(existing, key=lambda revision: -revision.number)
    accepted = next((r for r in newest_first if r.name == stable), None)
    ordered = [*filter(None, (accepted,)), *(r for r in newest_first if r is not accepted)]
    images = served_images(spec, existing, stable)
    new = Revision("", "", spec.inputs_json, 0, bool(spec.image), images)
    same = [r for r in ordered if _same(new, r)]
    image = spec.image or (default_image if spec.upgrade_policy is UpgradePolicy.LATEST else "")
    if not image:
        # Also one with another image than the stable one, of the default then, that is the newest
        # or has its verdict: another name for it would be rolled out once more.
        begun = {*tried, *(r.name for r in newest_first[:1])}
        kept = [accepted, *(r for r in newest_first if r.name in begun and not r.named)]
        if (found := next((r for r in kept if r in same), None)) is not None:
            return found
        image = _pinned_image(new, accepted, newest_first) or default_image
    if not image:
        raise SpecError(
            f"spec.image is required: spec.resources.gpus is {spec.gpus}, and the operator was "
            "started without --default-cuda-image (the chart's image.cuda)"
        )
    if (found := next((r for r in same if r.image == image), None)) is not None:
        return found
    taken = {revision.name for revision in existing}
    counter = 0
    while (name := revision_hash(spec.inputs_json, image, counter)) in taken:
        counter += 1
    number = max((revision.number for revision in existing), default=0) + 1
    return replace(new, name=name, image=image, number=number)


def served_images(spec: ServiceSpec, existing: list[Revision], stable: str) -> str | None:
    """Whether a new revision of this spec serves images. Without the field, if the stable one
    does. Until there is one, a server of spec.image may be of before images, and reads a launch
    file strictly; any other is asked for images unless the newest revision is one of text alone.
    Raises SpecError as modalities.images does."""
    accepted = next((r for r in existing if r.name == stable), None)
    newest = max((r for r in existing if not r.named), key=lambda r: r.number, default=None)
    if accepted is not None:
        serves = bool(accepted.served)
    else:
        serves = not spec.image and (newest is None or bool(newest.images))
    before = accepted.inputs.get("engine", {}) if accepted is not None else {}
    absent = Images.IF_SERVED if serves else None
    engine = json.loads(spec.inputs_json).get("engine", {})
    return modalities.images(engine, absent, before)


def same_pods(one: Revision, other: Revision) -> bool:
    """Whether they differ in nothing but their images and when they were asked for."""
    return _without(one.settled, ASKED) == _without(other.settled, ASKED)


def same_but_images(one: Revision, other: Revision) -> bool:
    """Whether their pods differ at most in what they serve of images, by the same image."""
    return one.image == other.image and _unseeing(one) == _unseeing(other)


def _unseeing(revision: Revision) -> Object:
    inputs = _without(revision.inputs, ASKED)
    fields = (NAME, *BOUNDS)
    return {**inputs, "engine": _without(inputs.get("engine", {}), fields)}


def _same(new: Revision, found: Revision) -> bool:
    """Whether a revision is the spec's, of which `new` would be made. Without spec.restartedAt it
    is, whenever it was restarted, and without spec.engine.modalities, where it would be made or
    serves as the absent field means: taking a field away restarts nothing, nor does writing what
    was measured to hold."""
    wants, has = new.inputs, found.inputs
    asked, restarted = wants.get("restartedAt"), has.get("restartedAt", has.get("restart"))
    if NAME in wants.get("engine", {}):
        serves = new.images == found.served
    else:
        serves = bool(new.images) in (bool(found.images), bool(found.served))
    as_found = replace(new, images=found.images, sees=found.sees)
    return same_pods(as_found, found) and serves and asked in (None, restarted)


def _pinned_image(new: Revision, accepted: Revision | None, newest_first: list[Revision]) -> str:
    """The image of the stable revision, for the same kind of device; before there is one, of the
    newest revision with the same pods. Empty where there is none."""
    if accepted is not None:
        resources = accepted.inputs.get("resources", {})
        wants = new.inputs.get("resources", {})
        return accepted.image if bool(gpus(resources)) == bool(gpus(wants)) else ""
    unnamed = (r for r in newest_first if not r.named)
    return next((r.image for r in unnamed if same_pods(new, r)), "")


def _without(inputs: Object, keys: tuple[str, ...]) -> Object:
    return {key: value for key, value in inputs.items() if key not in keys}
