"""Changes of an InferenceService by the plugin: annotations, or the spec of an earlier revision.

Pure: each returns a JSON patch of a resource as it was read, for Cluster.patch, which applies it
with the user's own permissions.
"""

from __future__ import annotations

import copy
from typing import Any

from kvline_contract.names import ANNOTATION_PROMOTE, ANNOTATION_RESTART, ANNOTATION_UPGRADE
from kvline_kubectl.cluster import Problem
from kvline_operator.api.spec import REVISION_CAPACITY_FIELDS, REVISION_FIELDS, canonical, parse
from kvline_operator.observe.pods import condition_of
from kvline_operator.plan.revisions import Revision, wanted
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.revision_state import PROMOTED

Object = dict[str, Any]
BELOW_BASELINE = "BelowBaseline"
Patch = list[Object]


def promote(
    body: Object, history: tuple[RevisionEntry, ...], revision: str | None
) -> tuple[str, Patch]:
    """The revision, and the patch that promotes it."""
    rollout = (body.get("status") or {}).get("rollout") or {}
    named = revision or rollout.get("candidateRevision") or rollout.get("rejectedRevision") or ""
    if (
        not named
        and condition_of(body.get("status") or {}, "CapacityStable").get("reason") == BELOW_BASELINE
    ):
        named = rollout.get("stableRevision", "")
    if not named:
        raise Problem(
            "nothing to promote: no revision is a candidate, rejected, or below its baseline"
        )
    past = _known(history, named)
    annotated = (body["metadata"].get("annotations") or {}).get(ANNOTATION_PROMOTE)
    if annotated == named and past.state.verdict == PROMOTED:
        away = f"kubectl annotate kvl {body['metadata']['name']} {ANNOTATION_PROMOTE}-"
        raise Problem(
            f"revision {named} is promoted already; to promote it again, first run: {away}"
        )
    return named, _annotated(body, {ANNOTATION_PROMOTE: named})


def upgrade(body: Object, now: str) -> Patch:
    """Changes to the operator's default image; the new revision has to pass its gate."""
    if body["spec"].get("image"):
        raise Problem("this service has spec.image; change it there")
    rollout = (body.get("status") or {}).get("rollout") or {}
    if not rollout.get("imageOutdated"):
        raise Problem("the service runs the operator's default image already")
    return _annotated(body, {ANNOTATION_UPGRADE: now})


def rollback(
    body: Object, history: tuple[RevisionEntry, ...], revision: str | None
) -> tuple[str, Patch]:
    """The revision, and the patch that restores its spec."""
    target = _known(history, revision) if revision else _before(body, history)
    after = copy.deepcopy(body)
    _restore(after, target)
    if not target.named:
        after["spec"].pop("image", None)
    existing = [Revision(p.name, p.image, canonical(p.inputs), p.number, p.named) for p in history]
    stable = ((body.get("status") or {}).get("rollout") or {}).get("stableRevision", "")
    if wanted(parse(after), existing, target.image, stable).name != target.name:
        after["spec"]["image"] = target.image
    if canonical([after["spec"], _annotations(after)]) == canonical(
        [body["spec"], _annotations(body)]
    ):
        raise Problem(f"the spec is that of revision {target.name} already")
    return target.name, _replaced(body, after)


def _before(body: Object, history: tuple[RevisionEntry, ...]) -> RevisionEntry:
    """With a candidate or a rejected revision the stable one; else the one accepted before it."""
    rollout = (body.get("status") or {}).get("rollout") or {}
    accepted = sorted(
        (p for p in history if p.state.accepted),
        key=lambda p: p.state.accepted,
        reverse=True,
    )
    unsettled = rollout.get("candidateRevision") or rollout.get("rejectedRevision")
    at = 0 if unsettled else 1
    if len(accepted) <= at:
        raise Problem("there is no earlier accepted revision")
    return accepted[at]


def _restore(body: Object, target: RevisionEntry) -> None:
    """Writes a revision's inputs into a resource; fields that make no revision are kept."""
    spec, inputs = body["spec"], target.inputs
    for key in REVISION_FIELDS:
        _set(spec, key, inputs.get(key))
    capacity = dict(spec.get("capacity") or {})
    for key in REVISION_CAPACITY_FIELDS:
        _set(capacity, key, (inputs.get("capacity") or {}).get(key))
    _set(spec, "capacity", capacity or None)
    annotations = dict(body["metadata"].get("annotations") or {})
    _set(annotations, ANNOTATION_RESTART, inputs.get("restart"))
    _set(annotations, ANNOTATION_UPGRADE, inputs.get("upgrade"))
    body["metadata"]["annotations"] = annotations


def _set(where: Object, key: str, value: Any) -> None:
    if value is None:
        where.pop(key, None)
    else:
        where[key] = value


def _known(history: tuple[RevisionEntry, ...], revision: str) -> RevisionEntry:
    for item in history:
        if item.name == revision:
            return item
    names = ", ".join(p.name for p in history) or "none"
    raise Problem(f"no revision {revision}; revisions: {names}")


def _annotations(body: Object) -> Object:
    return dict(body["metadata"].get("annotations") or {})


def _annotated(body: Object, more: Object) -> Patch:
    after = copy.deepcopy(body)
    after["metadata"]["annotations"] = {**_annotations(body), **more}
    return _replaced(body, after)


def _replaced(body: Object, after: Object) -> Patch:
    return [
        {"op": "add", "path": "/metadata/annotations", "value": _annotations(after)},
        {"op": "add", "path": "/spec", "value": after["spec"]},
    ]
