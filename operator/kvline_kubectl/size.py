"""`kubectl kvline size`: measures a spec in a Job, without changing the service.

The Job's pod is the one that the operator would create, with another command and without probes.
"""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.report import SizingReport
from kvline_kubectl.cluster import Cluster, Problem
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.plan.podspec import pod_template
from kvline_operator.plan.render import Owner, claim_template, launch_config
from kvline_operator.plan.revisions import Revision
from kvline_operator.settings import Settings

Object = dict[str, Any]
KEEP_SECONDS = 600  # ttlSecondsAfterFinished: time to read the log
DEADLINE_SECONDS = 3600
DROPPED = ("gate", "records")  # volumes that only serving needs
SERVING = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
WAITING = {
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "CreateContainerConfigError",
}


def from_file(path: Path, namespace: str) -> Object:
    """The one InferenceService of a manifest; it need not exist."""
    try:
        found = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise Problem(f"{path}: {error}") from None
    services = [d for d in found if d.get("kind") == names.KIND]
    if len(services) != 1 or not services[0].get("metadata", {}).get("name"):
        raise Problem(f"{path}: expected one named {names.KIND}, found {len(services)}")
    body = services[0]
    body["metadata"] = {"uid": "", **body["metadata"], "namespace": namespace}
    return dict(body)


def changed(
    body: Object, memory: str | None, engine: dict[str, int | str | None], random: bool
) -> Object:
    """The resource with the overrides of the command line."""
    after = copy.deepcopy(body)
    spec = after["spec"]
    if memory:
        spec["resources"] = {**spec.get("resources", {}), "memory": memory}
    given = {key: value for key, value in engine.items() if value is not None}
    if given:
        spec["engine"] = {**spec.get("engine", {}), **given}
    if random:
        spec["model"] = {**spec["model"], "loadFormat": "random"}
    return after


def objects(spec: ServiceSpec, image: str, hub: str = "") -> tuple[Object, list[Object]]:
    """The Job, and what it is to own: the ConfigMap with its launch file, and with
    gpuDeviceClass the ResourceClaimTemplate of its pod's GPU."""
    name = f"{spec.base}-size-{uuid.uuid4().hex[:5]}"
    revision = Revision("size", image, spec.inputs_json, 0)
    settings = Settings(image, hub_endpoint=hub)
    pod = pod_template(spec.base, spec, revision, settings, alone=True)["spec"]
    pod = {**pod, "restartPolicy": "Never", "serviceAccountName": "default"}
    server = {k: v for k, v in pod["containers"][0].items() if k not in SERVING}
    server["args"] = [
        "size",
        f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}",
        f"--state-dir={names.STATE_DIR}",
        "--json",
    ]
    server["volumeMounts"] = [m for m in server["volumeMounts"] if m["name"] not in DROPPED]
    pod["containers"] = [server]
    pod["volumes"] = [v for v in pod["volumes"] if v["name"] not in DROPPED]
    launch = next(v for v in pod["volumes"] if v["name"] == "launch")
    launch["configMap"]["name"] = name
    data = {"inputs": spec.inputs, "image": image, "servedName": spec.served_name}
    text = launch_config(Owner.of(spec), "size", data).dumps()
    meta = {"name": name, "namespace": spec.namespace}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": dict(meta),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "template": {"spec": pod},
        },
    }
    owned: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": dict(meta),
            "data": {names.LAUNCH_FILE: text},
        }
    ]
    if spec.device_class:
        pod["resourceClaims"][0]["resourceClaimTemplateName"] = name
        owned.append({**claim_template(spec.inputs["resources"]), "metadata": dict(meta)})
    return job, owned


def run(cluster: Cluster, body: Object, image: str, say: Callable[[str], None]) -> SizingReport:
    """Creates the Job, prints its progress, and returns the sizing report."""
    job, owned = objects(parse(body), image)
    name = job["metadata"]["name"]
    cluster.kube.create(job)
    made = cluster.kube.get("Job", cluster.namespace, name)
    if made is None:
        raise Problem(f"Job {name} is gone already")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made["metadata"]["uid"]}
    say(f"Job {name}")
    try:
        for item in owned:
            item["metadata"]["ownerReferences"] = [owner]
            cluster.kube.create(item)
        lines, status = _follow(cluster, name, say)
    except BaseException:  # a finished Job stays for its TTL, an abandoned one is deleted
        cluster.kube.delete("Job", cluster.namespace, name, made["metadata"]["uid"])
        raise
    return _report(lines, status, name)


def _follow(cluster: Cluster, name: str, say: Callable[[str], None]) -> tuple[list[str], Object]:
    """All output of the server container, and the final status of its pod."""
    shown_before = 0
    while True:
        time.sleep(1)
        pods = cluster.kube.select("Pod", cluster.namespace, f"job-name={name}")
        status = pods[0].get("status") or {} if pods else {}
        ended = status.get("phase") in ("Succeeded", "Failed")
        blocker = _blocker(status)
        if blocker:
            raise Problem(f"{name}: {blocker}")
        if status.get("phase") in (None, "Pending"):
            continue
        text = cluster.kube.log(cluster.namespace, pods[0]["metadata"]["name"], "server")
        lines = [line for line in text.splitlines() if line.strip()]
        shown = [line for line in lines if not line.startswith("{")]
        for line in shown[shown_before:]:
            say(line)
        shown_before = len(shown)
        if ended:
            return lines, status


def _blocker(status: Object) -> str:
    """Why the pod cannot run and waiting does not help; empty where it can."""
    for item in [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]:
        waiting = (item.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in WAITING:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    for item in status.get("conditions", []):
        if item.get("reason") == "Unschedulable":
            return f"Unschedulable: {item.get('message', '')}"
    return ""


def _report(lines: list[str], status: Object, name: str) -> SizingReport:
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return SizingReport.parse(line)
            except ContractError as error:
                raise Problem(f"{name}: its report cannot be read: {error}") from None
    for item in status.get("containerStatuses", []):
        ended = (item.get("state") or {}).get("terminated") or {}
        raise Problem(f"{name} ended with code {ended.get('exitCode')}: {_words(ended)}")
    raise Problem(f"{name} ended without a report")


def _words(ended: Object) -> str:
    message = ended.get("message") or ended.get("reason") or ""
    try:
        return str(json.loads(message)["message"])
    except (ValueError, KeyError, TypeError):
        return str(message)
