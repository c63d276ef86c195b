"""Whether a pod template is one that the renderer may have written: of Pod Security level
`restricted`, with one image, and with volumes of nothing but what its inputs name. Pure.

It is asked of an object that has no owner: its labels, name and field manager can be anybody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvline_contract.names import HUB_CA_VOLUME

Object = dict[str, Any]
HOST = ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "hostAliases")
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


def is_rendered(template: Object, base: str, inputs: Object, image: str) -> bool:
    try:
        return _is_rendered(template, base, inputs, image)
    except (AttributeError, TypeError):  # a ControllerRevision's data may have any shape
        return False


def _is_rendered(template: Object, base: str, inputs: Object, image: str) -> bool:
    pod = template.get("spec") or {}
    containers = [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]
    named = {base, *_strings(inputs)}
    return (
        bool(containers)
        and not any(pod.get(key) for key in (*HOST, "ephemeralContainers"))
        and pod.get("automountServiceAccountToken") is False
        and pod.get("serviceAccountName") in named
        and (pod.get("securityContext") or {}).get("runAsNonRoot") is True
        and all(c.get("image") == image and _is_restricted(c) for c in containers)
        and all(_reads_named(c, named) for c in containers)
        and all(_is_ours(v, base, named) for v in pod.get("volumes") or [])
    )


def _is_restricted(container: Object) -> bool:
    context = container.get("securityContext") or {}
    return (
        not context.get("privileged")
        and context.get("allowPrivilegeEscalation") is False
        and context.get("capabilities") == {"drop": ["ALL"]}
        and context.get("runAsUser") != 0
    )


def _reads_named(container: Object, named: set[str]) -> bool:
    """Whether its environment is of no other Secret, and of no ConfigMap at all."""
    found = [e.get("valueFrom") or {} for e in container.get("env") or []]
    secrets = {(f.get("secretKeyRef") or {}).get("name") for f in found} - {None}
    return (
        secrets <= named
        and not any("configMapKeyRef" in f for f in found)
        and not container.get("envFrom")
    )


def _is_ours(volume: Object, base: str, named: set[str]) -> bool:
    kind = "".join(volume.keys() - {"name"})
    source = volume.get(kind) or {}
    if kind not in VOLUMES:
        return False
    if kind == "configMap":
        of_settings = volume["name"] == HUB_CA_VOLUME
        return of_settings or str(source.get("name", "")).startswith(f"{base}-")
    if kind == "secret":
        return source.get("secretName") in named
    if kind != "persistentVolumeClaim":
        return True
    claim = source.get("claimName")
    return any(claim == text or text.startswith(f"pvc://{claim}/") for text in named)


def _strings(value: Any) -> Iterator[str]:
    """All that inputs say."""
    if isinstance(value, str):
        yield value
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        yield from _strings(item)
