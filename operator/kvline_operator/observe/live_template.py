"""Whether a live pod template is the stored one. Pure.

It is asked of a Deployment or Job that has no owner. The live template may have the API server's
defaults and what webhooks change without another content: the image's registry where the digest is
equal, the pull policy, the grace period, more labels and annotations. A webhook's sidecar is no
part of it, as nothing tells it from a forgery.
"""

from __future__ import annotations

from typing import Any

from kvline_contract import names
from kvline_operator.api import quantity

Object = dict[str, Any]
FREE = ("imagePullPolicy", "terminationGracePeriodSeconds")
DEFAULTS: Object = {
    "apiVersion": ("v1",),
    "creationTimestamp": (None,),
    "defaultMode": (420,),
    "dnsPolicy": ("ClusterFirst",),
    "failureThreshold": (3,),
    "imagePullPolicy": ("Always", "IfNotPresent"),
    "periodSeconds": (10,),
    "protocol": ("TCP",),
    "restartPolicy": ("Always",),
    "schedulerName": ("default-scheduler",),
    "scheme": ("HTTP",),
    "successThreshold": (1,),
    "terminationMessagePath": (names.TERMINATION_LOG,),
    "terminationMessagePolicy": ("File",),
    "timeoutSeconds": (1,),
}
QUANTITIES = ("requests", "limits", "sizeLimit")
CHECK = ["check", f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}"]
SHARED = (  # by a Job's pod with the revision's, but for tolerations, of which a Job adds some
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "nodeSelector",
    "priorityClassName",
    "imagePullSecrets",
)
OF_JOBS = ("affinity", "containers", "restartPolicy", "tolerations", "volumes")
OF_CHECKS = ("args", "resources", "terminationMessagePolicy")


def is_deployment_of(live: Object, stored: Object) -> bool:
    """Whether a Deployment's template is what the ControllerRevision's data has."""
    try:
        wanted = stored["podTemplate"]
        return all(
            wanted["metadata"].get(kind, {}).items() <= live["metadata"].get(kind, {}).items()
            for kind in ("labels", "annotations")
        ) and _equal(_pod(live), wanted["spec"])
    except (AttributeError, KeyError, TypeError, ValueError):  # a live one has any fields
        return False


def is_job_of(live: Object, stored: Object) -> bool:
    """Whether a Job's template is made of that data: it downloads the model, or checks it."""
    try:
        pod, wanted = _pod(live), stored["podTemplate"]["spec"]
        (container,) = pod["containers"]
        loads = [stored.get("download"), *wanted.get("initContainers", []), *wanted["containers"]]
        shared = {k: wanted[k] for k in SHARED if k in wanted}
        return (
            _equal({k: v for k, v in pod.items() if k not in OF_JOBS}, shared)
            and _within(pod.get("volumes", []), wanted["volumes"])
            and any(_is_step(container, one) for one in loads if one)
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _pod(template: Object) -> Object:
    """Without the earlier name of serviceAccountName, which the API server adds."""
    pod: Object = dict(template["spec"])
    if pod.get("serviceAccount") == pod["serviceAccountName"]:
        del pod["serviceAccount"]
    return pod


def _is_step(container: Object, one: Object) -> bool:
    if container["args"] != CHECK:
        return one["args"][:1] == ["download"] and _equal(container, one)
    rest = {k: v for k, v in container.items() if k not in OF_CHECKS}
    return _within(rest, one) and _equal(container["securityContext"], one["securityContext"])


def _equal(live: Any, stored: Any) -> bool:
    return _within(live, stored) and _within(stored, live, defaults=False)


def _within(value: Any, other: Any, key: str = "", defaults: bool = True) -> bool:
    """Whether each field and item of `value` is in the other, or with `defaults` is one."""
    if key in FREE:
        return True
    if key in QUANTITIES:
        return bool(_amounts(value) == _amounts(other))
    if isinstance(value, dict) and isinstance(other, dict):
        return all(
            _within(item, other[name], name, defaults)
            if name in other
            else item in (None, {}, []) or (defaults and item in DEFAULTS.get(name, ()))
            for name, item in value.items()
        )
    if isinstance(value, list) and isinstance(other, list) and _has_objects(value):
        return all(any(_within(v, o, "", defaults) for o in other) for v in value)
    return bool(value == other or (key == "image" and _is_same_image(value, other)))


def _has_objects(items: list[Any]) -> bool:
    return all(isinstance(item, dict) for item in items)


def _is_same_image(one: str, other: str) -> bool:
    """By digest, from whatever registry."""
    digests = one.partition("@")[2], other.partition("@")[2]
    return digests[0].startswith("sha256:") and digests[0] == digests[1]


def _amounts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _amounts(amount) for name, amount in value.items()}
    return quantity.comparable(value)
