"""What end-to-end tests share: waiting for a condition, and what a failed one shows."""

from __future__ import annotations

import json
import re
from typing import Any

from playground import Space
from waiting import NotInTime, eventually, limit, spent

from kvline_contract.names import LABEL_PREPARES

HUB_PORT = 18090  # on the node
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def up(cluster: Any, namespace: str, **values: str) -> Space:
    """A new cluster with our images and charts, and a namespace that enforces Pod Security
    restricted and has the models in a claim. `values` are more of the chart's."""
    import build
    import helm
    import model

    helm.ensure(print)
    model.ensure(print)
    cluster.claim_use()
    with spent("cluster"):
        cluster.down()
        cluster.up(print)
    build.load(cluster.images, print)
    for name in ("kvline-system", namespace):
        cluster.kubectl("create", "namespace", name)
        cluster.kubectl("label", "namespace", name, RESTRICTED)
    install(cluster, **values)
    cluster.claim(namespace, model.MODELS)
    return Space(cluster, namespace)


def install(cluster: Any, **more: str) -> None:
    """Installs both charts with the images of this tree. `more` are values of the chart."""
    import build
    import helm
    from network import NODE_ADDRESS

    values = {
        "image.operator": build.image_name("operator"),
        "image.server": build.image_name("server"),
        "image.allowTags": "true",
        "page.enabled": "true",
        "hubEndpoint": f"http://{NODE_ADDRESS}:{HUB_PORT}",
        **more,
    }
    values_set = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    where = _where(cluster)
    helm.helm("upgrade", "--install", "kvline-crds", "charts/kvline-crds", *where)
    helm.helm("upgrade", "--install", "kvline", "charts/kvline", *values_set, *where)


def uninstall(cluster: Any) -> None:
    """Uninstalls both charts, kvline-crds first; its CRD must stay."""
    import helm

    for release in ("kvline-crds", "kvline"):
        helm.helm("uninstall", release, *_where(cluster))


def _where(cluster: Any) -> list[str]:
    """Helm's words for a release of ours, and for how long it waits until its objects are ready."""
    where = ["--kubeconfig", str(cluster.kubeconfig), "--namespace", "kvline-system"]
    return [*where, "--wait", f"--timeout={limit(300):.0f}s"]


def wait(space: Any, name: str, kind: str, seconds: float = 240, **wanted: str) -> dict[str, Any]:
    def reached() -> Any:
        condition = space.condition(kind, name)
        return condition if all(condition.get(k) == v for k, v in wanted.items()) else None

    try:
        return dict(eventually(reached, seconds, on="pod"))
    except NotInTime as error:
        raise NotInTime(f"{error}\n{describe(space, name)}") from None


def pods(space: Any) -> list[dict[str, Any]]:
    """Pods of services, without those of prepare Jobs."""
    found = [p for p in space.list("pods") if not p["metadata"].get("deletionTimestamp")]
    return [p for p in found if LABEL_PREPARES not in (p["metadata"].get("labels") or {})]


def gone(space: Any, seconds: float = 120) -> None:
    """Waits until the namespace has no pod at all. Raises NotInTime with those that it has."""
    try:
        eventually(lambda: not space.list("pods"), seconds, on="garbage collector")
    except NotInTime as error:
        names = ("name", "labels", "ownerReferences", "finalizers", "deletionTimestamp")
        left = [
            {name: pod["metadata"].get(name) for name in names} | {"phase": pod["status"]["phase"]}
            for pod in space.list("pods")
        ]
        raise NotInTime(f"{error}; left: {json.dumps(left, indent=1)}") from None


def describe(space: Any, name: str) -> str:
    pods = space.kubectl("get", "pods", "-o", "wide", check=False).stdout
    status = (space.get("kvl", name) or {}).get("status")
    logs = space.kubectl(
        "logs", "-l", "app.kubernetes.io/managed-by=kvline", "--tail=20", check=False
    ).stdout
    return f"{pods}\n{json.dumps(status, indent=1)}\n{logs}"


def columns(shown: str) -> dict[str, str]:
    """Of the one service that `kubectl get` shows, by their heads; some are empty."""
    head, line = shown.splitlines()
    names = list(re.finditer(r"\S+(?: \S+)*", head))
    ends = [each.start() for each in names[1:]] + [len(line)]
    found = {}
    for name, end in zip(names, ends, strict=True):
        found[name.group()] = line[name.start() : end].strip()
    return found
