"""Scheduling fields, labels and annotations of a revision's pods, with defaults. Pure.

An affinity or spread term without a labelSelector gets one for the pods of its own revision; to
Kubernetes it would match no pods.
"""

from __future__ import annotations

from typing import Any

from kvline_contract import names
from kvline_operator.api.spec import gpus
from kvline_operator.settings import Settings

Object = dict[str, Any]
AS_GIVEN = ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName")


def labels(base: str, revision: str) -> Object:
    """The operator's own labels, by which it selects the pods."""
    return {
        names.LABEL_SERVICE: base,
        names.LABEL_REVISION: revision,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }


def metadata(inputs: Object, own: Object) -> Object:
    given = inputs.get("podMetadata", {})
    out: Object = {"labels": {**given.get("labels", {}), **own}}
    if given.get("annotations"):
        out["annotations"] = given["annotations"]
    return out


def fields(inputs: Object, base: str, revision: str, settings: Settings) -> Object:
    """Fields of the pod spec. The InferenceService takes precedence over the operator's settings;
    both are stored in the revision, so that a changed setting restarts no pod."""
    given = inputs.get("scheduling", {})
    own = {"matchLabels": {names.LABEL_SERVICE: base, names.LABEL_REVISION: revision}}
    of_gpus = settings.runtime_class if gpus(inputs["resources"]) else ""
    made = {
        "runtimeClassName": of_gpus,
        "priorityClassName": settings.priority_class,
        "imagePullSecrets": inputs.get("imagePullSecrets")
        or [{"name": name} for name in settings.pull_secrets],
        **{key: given[key] for key in AS_GIVEN if given.get(key)},
        "affinity": _affinity(given.get("affinity", {}), own),
        "topologySpreadConstraints": [
            {"labelSelector": own, **constraint}
            for constraint in given.get("topologySpreadConstraints", [])
        ],
    }
    return {key: value for key, value in made.items() if value}


def _affinity(given: Object, own: Object) -> Object:
    return {kind: _terms(part, own) if "pod" in kind else part for kind, part in given.items()}


def _terms(part: Object, own: Object) -> Object:
    """Terms of podAffinity or podAntiAffinity; preferred ones are wrapped with a weight."""
    out: Object = {}
    for key, terms in part.items():
        out[key] = [
            {**term, "podAffinityTerm": {"labelSelector": own, **term["podAffinityTerm"]}}
            if "podAffinityTerm" in term
            else {"labelSelector": own, **term}
            for term in terms
        ]
    return out
