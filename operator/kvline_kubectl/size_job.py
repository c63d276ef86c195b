"""The Job that measures a spec. Its pod is the one that the operator would create, with another
command and without probes."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvline_contract import names, times
from kvline_contract.codec import ContractError
from kvline_contract.report import SizingReport
from kvline_kubectl.cluster import Cluster, Problem
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.observe.pods import condition_of, view
from kvline_operator.observe.reports import Reading
from kvline_operator.observe.trouble import before_start
from kvline_operator.plan.placement import metadata
from kvline_operator.plan.podspec import pod_template
from kvline_operator.plan.render import Owner, claim_template, launch_config
from kvline_operator.plan.revisions import Revision
from kvline_operator.settings import Settings

Object = dict[str, Any]
Say = Callable[[str], None]
Reports = dict[str, SizingReport]
AS_GIVEN = "as given"  # the name of the spec itself among the choices of a comparison
KEEP_SECONDS = 600  # ttlSecondsAfterFinished: time to read the log
DEADLINE_SECONDS = 3600  # of one measurement, with the wait for a node
DROPPED = ("gate", "records")  # volumes that only serving needs
SERVING = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
# An autoscaler, a queue or a slow volume may end these.
WAITED_FOR = {"Unschedulable", "SchedulingGated", "PodNotSetUp", "RollingOut"}
TERMINATED = 143  # as a shell has it for SIGTERM


@dataclass(frozen=True, slots=True)
class Question:
    """What is measured."""

    body: Object  # an InferenceService
    image: str
    settings: Settings
    compare: str = ""  # changes of one field each, as FIELD=VALUE,...
    largest: Object | None = None  # the service with the resources that every choice fits
    images: str | None = None  # as a Revision's


def operator_settings(image: str, stored: Object | None) -> Settings:
    """Those of the operator that pods get and a spec does not have, as a ControllerRevision's pods
    got them."""
    data = (stored or {}).get("data") or {}
    pod = (data.get("podTemplate") or {}).get("spec") or {}
    loads = [*pod.get("initContainers", []), data.get("download") or {}]
    found = {e["name"]: e.get("value", "") for c in loads for e in c.get("env", [])}
    authority = (v for v in pod.get("volumes", []) if v["name"] == names.HUB_CA_VOLUME)
    inputs = data.get("inputs") or {}
    of_service = {**(inputs.get("scheduling") or {}), **inputs}  # its own, which a spec has

    def given(field: str, none: Any = "") -> Any:
        return none if field in of_service else pod.get(field, none)

    return Settings(
        image,
        hub_endpoint=found.get("HF_ENDPOINT", ""),
        hub_proxy=found.get("HTTPS_PROXY", ""),
        hub_no_proxy=tuple(filter(None, found.get("NO_PROXY", "").split(","))),
        hub_ca=next((v["configMap"]["name"] for v in authority), ""),
        platform_user=bool(pod) and "runAsUser" not in pod["securityContext"],
        pull_secrets=tuple(item["name"] for item in given("imagePullSecrets", [])),
        runtime_class=given("runtimeClassName"),
        priority_class=given("priorityClassName"),
    )


def objects(asked: Question) -> tuple[Object, list[Object]]:
    """The Job, and what it is to own: the ConfigMap with its launch file, and with
    gpuDeviceClass the ResourceClaimTemplate of its pod's GPU."""
    spec = parse(asked.body)
    name = f"{spec.base}-size-{uuid.uuid4().hex[:5]}"
    room = parse(asked.largest or asked.body)
    data = {
        "inputs": spec.inputs,
        "image": asked.image,
        "servedName": spec.served_name,
        "images": asked.images,
    }
    meta = {"name": name, "namespace": spec.namespace}
    choices = 1 + len(asked.compare.split(",")) if asked.compare else 1
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": dict(meta),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": choices
            * max(DEADLINE_SECONDS, spec.inputs.get("startupSeconds", 0)),
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "template": {
                # Without the labels by which a Service finds its replicas.
                "metadata": metadata(spec.inputs, {}),
                "spec": _pod(asked, room, name),
            },
        },
    }
    launch = launch_config(Owner.of(spec), "size", data).dumps()
    owned: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": dict(meta),
            "data": {names.LAUNCH_FILE: launch},
        }
    ]
    if room.device_class:
        owned.append({**claim_template(room.inputs["resources"]), "metadata": dict(meta)})
    return job, owned


def _pod(asked: Question, room: ServiceSpec, name: str) -> Object:
    revision = Revision("size", asked.image, room.inputs_json, 0)
    pod = pod_template(room.base, room, revision, asked.settings, alone=True)["spec"]
    account = room.inputs.get("serviceAccountName", "default")
    pod = {**pod, "restartPolicy": "Never", "serviceAccountName": account}
    server = {k: v for k, v in pod["containers"][0].items() if k not in SERVING}
    server["args"] = [
        "size",
        f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}",
        f"--state-dir={names.STATE_DIR}",
        "--json",
        *_comparison(asked, room),
    ]
    server["volumeMounts"] = [m for m in server["volumeMounts"] if m["name"] not in DROPPED]
    pod["containers"] = [server]
    pod["volumes"] = [v for v in pod["volumes"] if v["name"] not in DROPPED]
    launch = next(v for v in pod["volumes"] if v["name"] == "launch")
    launch["configMap"]["name"] = name
    if room.device_class:
        pod["resourceClaims"][0]["resourceClaimTemplateName"] = name
    return pod


def _comparison(asked: Question, room: ServiceSpec) -> list[str]:
    """On a CPU the spec itself is measured within its own memory, also in a container that has
    room for more."""
    if not asked.compare:
        return []
    memory = parse(asked.body).inputs["resources"]["memory"]
    return [f"--compare={asked.compare}", *([] if room.gpus else [f"--memory={memory}"])]


def run(cluster: Cluster, asked: Question, say: Say) -> Reports:
    """Creates the Job, prints its progress, and returns the sizing reports by choice."""
    job, owned = objects(asked)
    name = job["metadata"]["name"]
    cluster.kube.create(job)
    made = cluster.kube.get("Job", cluster.namespace, name)
    if made is None:
        raise Problem(f"Job {name} is gone already")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made["metadata"]["uid"]}
    with _deleted_unless_finished(cluster, name, made["metadata"]["uid"]):
        say(f"Job {name}")
        for item in owned:
            item["metadata"]["ownerReferences"] = [owner]
            cluster.kube.create(item)
        lines, status = _follow(cluster, name, say)
    return _reports(lines, status, name)


@contextmanager
def _deleted_unless_finished(cluster: Cluster, name: str, uid: str) -> Iterator[None]:
    """A finished Job stays for its TTL; an abandoned one is deleted, also on SIGTERM, with which CI
    systems and `timeout` end a command."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except BaseException:
        cluster.kube.delete("Job", cluster.namespace, name, uid)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _follow(cluster: Cluster, name: str, say: Say) -> tuple[list[str], Object]:
    """All output of the server container, and the final status of its pod."""
    shown_before, waited = 0, ""
    while True:
        time.sleep(1)
        pods = cluster.kube.select("Pod", cluster.namespace, f"job-name={name}")
        if not pods:
            waited = _without_pod(cluster, name, waited, say)
            continue
        status = pods[0].get("status") or {}
        if status.get("phase") in (None, "Pending"):
            waited = _wait(pods[0], name, waited, say)
            continue
        text = cluster.kube.log(cluster.namespace, pods[0]["metadata"]["name"], "server")
        lines = [line for line in text.splitlines() if line.strip()]
        shown = [line for line in lines if not line.startswith("{")]
        for line in shown[shown_before:]:
            say(line)
        shown_before = len(shown)
        if status.get("phase") in ("Succeeded", "Failed"):
            return lines, status


def _without_pod(cluster: Cluster, name: str, waited: str, say: Say) -> str:
    """A Job whose pod is refused, as by a quota, goes on trying; one past its deadline has none."""
    job = cluster.kube.get("Job", cluster.namespace, name)
    if job is None:
        raise Problem(f"Job {name} is gone")
    failed = condition_of(job.get("status") or {}, "Failed")
    if failed.get("status") == "True":
        raise Problem(f"{name}: {failed.get('reason')}: {failed.get('message')}")
    uid = job["metadata"]["uid"]
    events = cluster.kube.select("Event", cluster.namespace)
    own = [e for e in events if e["involvedObject"].get("uid") == uid and e["type"] == "Warning"]
    return _once(own[-1]["message"], waited, say) if own else waited


def _wait(pod: Object, name: str, waited: str, say: Say) -> str:
    """Reports what a pod waits for, each cause once. Raises Problem where waiting does not help."""
    trouble = before_start(view(pod, Reading(None), times.now()))
    if trouble is None:
        return waited
    if trouble.reason not in WAITED_FOR:
        raise Problem(f"{name}: {trouble.reason}: {trouble.message}")
    return _once(f"{trouble.reason}: {trouble.message}", waited, say)


def _once(text: str, before: str, say: Say) -> str:
    if text != before:
        say(f"waits, Ctrl-C ends it: {text}")
    return text


def _reports(lines: list[str], status: Object, name: str) -> Reports:
    for line in reversed(lines):
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
            if "version" in found:
                return {AS_GIVEN: SizingReport.parse(line)}
            return {key: SizingReport.parse(json.dumps(each)) for key, each in found.items()}
        except (ContractError, ValueError) as error:
            raise Problem(f"{name}: its report cannot be read: {error}") from None
    for item in status.get("containerStatuses", []):
        ended = (item.get("state") or {}).get("terminated") or {}
        why = _words(ended) or (lines[-1] if lines else "")
        raise Problem(f"{name} ended with code {ended.get('exitCode')}: {why}")
    raise Problem(f"{name} ended without a report")


def _words(ended: Object) -> str:
    message = ended.get("message") or ""
    try:
        return str(json.loads(message)["message"])
    except (ValueError, KeyError, TypeError):
        return str(message) or str(ended.get("reason", "").replace("Error", ""))
