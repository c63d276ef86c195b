"""Changes of an InferenceService by the plugin: fields that ask for an act, or the spec of an
earlier revision.

Pure: each returns a JSON patch of a resource as it was read, for Cluster.patch, which applies it
with the user's own permissions.
"""

from __future__ import annotations

import copy
from typing import Any

from kvline_kubectl.cluster import Problem
from kvline_operator.api.modalities import NAME
from kvline_operator.api.spec import (
    REVISION_CAPACITY_FIELDS,
    REVISION_FIELDS,
    UpgradePolicy,
    canonical,
    parse,
)
from kvline_operator.observe.pods import condition_of
from kvline_operator.plan.phase import tried
from kvline_operator.plan.revisions import same_pods, wanted
from kvline_operator.report.status_cache import RevisionEntry

Object = dict[str, Any]
BELOW_BASELINE = "BelowBaseline"
LATEST = str(UpgradePolicy.LATEST)
Patch = list[Object]


def pause(body: Object) -> Patch:
    if _rollout(body).get("paused"):
        raise Problem("spec.rollout.paused is true already")
    return _with_rollout(body, paused=True)


def resume(body: Object) -> Patch:
    if not _rollout(body).get("paused"):
        raise Problem("spec.rollout.paused is not true")
    return _with_rollout(body, paused=None)


def restart(body: Object, now: str) -> Patch:
    return _with_spec({**body["spec"], "restartedAt": now})


def promote(
    body: Object, history: tuple[RevisionEntry, ...], revision: str | None
) -> tuple[str, Patch]:
    """The revision, and the patch that promotes it."""
    status = body.get("status") or {}
    rollout = status.get("rollout") or {}
    named = revision or rollout.get("candidateRevision") or rollout.get("rejectedRevision") or ""
    if not named and condition_of(status, "CapacityStable").get("reason") == BELOW_BASELINE:
        named = rollout.get("stableRevision", "")
    if not named:
        raise Problem(
            "nothing to promote: no revision is a candidate, rejected, or below its baseline"
        )
    past, gate = _known(history, named), rollout.get("gate") or {}
    if not past.state.was_measured and not (gate.get("revision") == named and gate.get("measured")):
        why = f": {gate['message']}" if gate.get("revision") == named else ""
        raise Problem(f"no replica of revision {named} has been measured{why}")
    if _rollout(body).get("promote") == named:
        raise Problem(
            f"spec.rollout.promote is {named} already; to promote it again, remove the field first"
        )
    return named, _with_rollout(body, promote=named)


def refused(body: Object) -> str:
    """Why the operator does not accept what was asked for; empty where it does."""
    for kind, reason in (("Accepted", "SpecInvalid"), ("UpToDate", "PromotionRefused")):
        condition = condition_of(body.get("status") or {}, kind)
        if condition.get("reason") == reason:
            return str(condition.get("message") or reason)
    return ""


def upgrade(body: Object) -> Patch:
    """Follows the operator's default image from now on; each new revision has to pass its gate."""
    spec = body["spec"]
    if spec.get("image"):
        raise Problem("this service has spec.image; change it there")
    if spec.get("upgradePolicy") == LATEST:
        raise Problem(f"spec.upgradePolicy is {LATEST} already")
    return _with_spec({**spec, "upgradePolicy": LATEST})


def rollback(
    body: Object, history: tuple[RevisionEntry, ...], revision: str | None
) -> tuple[str, Patch]:
    """The revision, and the patch that restores its spec."""
    target = _known(history, revision) if revision else _before(body, history)
    after = copy.deepcopy(body)
    _restore(after["spec"], target)
    if not target.named:
        after["spec"].pop("image", None)
    stable = next((past for past in history if past.name == _stable(body)), None)
    if stable is not None:
        _name_modalities(after["spec"], target, stable)
    existing = [past.revision for past in history]
    begun = tried({past.name: past.state for past in history})
    found = wanted(parse(after), existing, target.image, _stable(body), begun)
    if found.image != target.image:
        after["spec"]["image"] = target.image
    if canonical(after["spec"]) == canonical(body["spec"]):
        raise Problem(f"the spec is that of revision {target.name} already")
    return target.name, _with_spec(after["spec"])


def _before(body: Object, history: tuple[RevisionEntry, ...]) -> RevisionEntry:
    """With a candidate or a rejected revision the stable one; else the one accepted before it with
    other pods: a restart alone is nothing to go back from."""
    rollout = (body.get("status") or {}).get("rollout") or {}
    accepted = sorted(
        (p for p in history if p.state.accepted),
        key=lambda p: p.state.accepted,
        reverse=True,
    )
    unsettled = rollout.get("candidateRevision") or rollout.get("rejectedRevision")
    if accepted and unsettled:
        return accepted[0]
    for earlier in accepted[1:]:
        now = accepted[0]
        if earlier.image != now.image or not same_pods(earlier.revision, now.revision):
            return earlier
    raise Problem("there is no earlier accepted revision")


def _restore(spec: Object, target: RevisionEntry) -> None:
    """Writes a revision's inputs into a spec. Fields that make no revision are kept, but for those
    that would lead away from it again."""
    inputs = target.inputs
    for key in REVISION_FIELDS:
        _set(spec, key, inputs.get(key))
    capacity = dict(spec.get("capacity") or {})
    for key in REVISION_CAPACITY_FIELDS:
        _set(capacity, key, (inputs.get("capacity") or {}).get(key))
    _set(spec, "capacity", capacity or None)
    rollout = {k: v for k, v in (spec.get("rollout") or {}).items() if k != "promote"}
    _set(spec, "rollout", rollout or None)
    spec.pop("upgradePolicy", None)


def _name_modalities(spec: Object, target: RevisionEntry, stable: RevisionEntry) -> None:
    """Where the field that a revision did not have would mean now what the stable one serves, and
    that is another thing."""
    past = target.revision
    serves = bool(stable.revision.served)
    if NAME not in (spec.get("engine") or {}) and serves not in (
        bool(past.images),
        bool(past.served),
    ):
        spec["engine"] = past.settled["engine"]


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


def _stable(body: Object) -> str:
    return str(((body.get("status") or {}).get("rollout") or {}).get("stableRevision", ""))


def _rollout(body: Object) -> Object:
    return dict(body["spec"].get("rollout") or {})


def _with_rollout(body: Object, **changed: Any) -> Patch:
    """Sets fields of spec.rollout; None removes one."""
    rollout = _rollout(body) | changed
    spec = dict(body["spec"])
    _set(spec, "rollout", {k: v for k, v in rollout.items() if v is not None} or None)
    return _with_spec(spec)


def _with_spec(spec: Object) -> Patch:
    return [{"op": "add", "path": "/spec", "value": spec}]
