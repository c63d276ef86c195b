"""Steps: what ends a replica, and what must not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from errors import ClusterError
from gpu_cluster import NEXT
from gpu_figures import POD_DELETED, RECORDED_READY
from gpu_processes import ENGINE, SUPERVISOR, age, find, gpu_of
from gpu_rollouts import answers_again
from gpu_run import NotRun, Run, is_pod_ready, restarts
from gpu_traffic import Traffic
from install import OPERATOR, ROLLED_OUT
from install import install as install_operator
from service import Service, condition, is_ready

Object = dict[str, Any]
NEIGHBOUR_MIB = 20480


def killed(run: Run) -> None:
    """The engine's process, as the kernel ends one: nothing of it can answer any more."""
    pod = run.serving_pod()
    began = _kill_engine(run, pod)
    took = run.service.watch(
        lambda s: is_back(run.service, s, pod), run.shape.seconds, began, "Ready"
    )
    show_end(run, run.service)
    run.show_conditions()
    run.expect(run.service.status()["capacity"]["source"] == "Recorded", "Ready from the record")
    run.say(f"killed to Ready: {took:.1f} s")


def _kill_engine(run: Run, pod: Object) -> float:
    pid = find(pod["metadata"]["uid"], ENGINE)
    run.say(f"$ kill -9 {pid}  # the engine of {pod['metadata']['name']}, on its node")
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def is_back(service: Service, found: Object, pod: Object) -> bool:
    """Whether the same pod serves again after one more restart."""
    now = service.pods()
    same = [p for p in now if p["metadata"]["uid"] == pod["metadata"]["uid"]]
    again = any(restarts(p) > restarts(pod) and is_pod_ready(p) for p in same)
    return again and is_ready(found)


def show_end(run: Run, service: Service) -> None:
    """How Kubernetes tells the end of the container, with the server's own message."""
    for pod in service.pods():
        for container in pod["status"]["containerStatuses"]:
            ended = container.get("lastState", {}).get("terminated")
            if ended:
                termination = json.loads(
                    ended.get("message") or "{}"
                )  # empty after a kill of the group
                text = (
                    f"{termination.get('name', ended['reason'])}: {termination.get('message', '')}"
                )
                run.say(f"{container['name']} ended: {ended['exitCode']} {text}")


def neighbour(run: Run) -> None:
    """A program outside Kubernetes takes memory of the GPU before the engine is back."""
    if not run.cluster.gpus:
        raise NotRun("needs a GPU")
    pod, full = run.serving_pod(), run.tokens()
    with _taken(run, pod) as held:
        began = _kill_engine(run, pod)
        run.expect(held() == "held", f"another program holds {NEIGHBOUR_MIB} MiB of the GPU")
        run.service.watch(
            lambda s: (
                is_back(run.service, s, pod) and condition(s, "CapacityStable")["status"] == "False"
            ),
            run.shape.seconds,
            began,
            "Ready",
        )
        run.show_conditions()
        run.service.show_budget()
        beside = run.tokens()
        stable = condition(run.service.get(), "CapacityStable")
        run.expect(beside < 0.95 * full, f"{beside} KV tokens beside the neighbour, {full} before")
        run.expect(
            stable["reason"] == "BelowBaseline", "the status says BelowBaseline; it serves", stable
        )
        run.save("describe-neighbour.txt", _described(run))
    run.say("the neighbour has ended; the pod is measured anew:")
    _delete_pod(run, run.serving_pod())
    run.expect(run.tokens() >= 0.995 * full, f"{run.tokens()} KV tokens again")


def _described(run: Run) -> str:
    return str(run.cluster.kubectl("describe", "kvl", run.shape.name).stdout)


@contextmanager
def _taken(run: Run, pod: Object) -> Iterator[Any]:
    """A program that waits for free memory of the pod's GPU; what is yielded waits until it has
    it."""
    words = ("demo/gpu_neighbour.py", str(NEIGHBOUR_MIB))
    variables = {}
    if run.cluster.gpus > 1:
        variables["CUDA_VISIBLE_DEVICES"] = gpu_of(find(pod["metadata"]["uid"], ENGINE))
    program = run.start(*words, variables=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None and program.stdout is not None
    lines = program.stdout
    try:
        if lines.readline().strip() != "waits":
            raise ClusterError("the neighbour finds no driver")
        yield lambda: lines.readline().strip()
    finally:
        program.stdin.close()
        program.wait(30)


def deleted(run: Run) -> None:
    pod = run.serving_pod()
    took, since_start = _delete_pod(run, pod)
    run.figures.record(POD_DELETED, took)
    run.figures.record(RECORDED_READY, since_start)
    (new,) = run.service.pods()
    run.expect(run.service.status()["capacity"]["source"] == "Recorded", "Ready from the record")
    run.expect(restarts(new) == 0, "without a restart")


def _delete_pod(run: Run, pod: Object) -> tuple[float, float]:
    """-> seconds from the deletion, and from the start of its container, to another one Ready"""
    name = pod["metadata"]["name"]
    run.say(f"$ kubectl delete pod {name} --wait=false")
    seen: list[float] = []

    def another(found: Object) -> bool:
        if not is_ready(found):
            return False
        new = [p for p in run.service.pods() if p["metadata"]["uid"] != pod["metadata"]["uid"]]
        if not any(is_pod_ready(p) for p in new):
            return False
        seen.append(age(find(new[0]["metadata"]["uid"], SUPERVISOR)))
        return True

    with run.cluster.service(run.shape.name) as url, Traffic(url, run.shape.name) as traffic:
        began = time.monotonic()
        run.cluster.kubectl("delete", "pod", name, "--wait=false")
        took = run.service.watch(another, run.shape.seconds, began, "Ready")
        answers_again(traffic, run.shape.seconds)
    run.say(f"{traffic.gap():.1f} s without an answer")
    return took, seen[-1]


def upgrade(run: Run) -> None:
    """Another operator: restarted, then of another image and with another default server image,
    then as before."""
    before = _living(run)
    run.serving_pod()
    with (
        run.cluster.service(run.shape.name) as url,
        Traffic(url, run.shape.name, patient=True) as traffic,
    ):
        _operator(run, "rollout", "restart", "deployment/kvline-operator")
        images = run.cluster.image_names()
        if NEXT in images:
            _operator(run, "set", "image", "deployment/kvline-operator", f"operator={images[NEXT]}")
        name, image = ("CUDA_IMAGE", "cuda") if run.cluster.gpus else ("IMAGE", "server")
        default = f"KVLINE_DEFAULT_{name}={images[image]}-next"
        _operator(run, "set", "env", "deployment/kvline-operator", default)
        _outdated(run, True)
        run.say("status.rollout.imageOutdated is true: kubectl kvline upgrade would change it")
        install_operator(run.cluster, run.say)
        _outdated(run, False)
    run.expect(_living(run) == before, "no serving pod moved or restarted", (before, _living(run)))
    run.say(traffic.summary())
    run.expect(bool(traffic.answered) and not traffic.failed, "no request failed", traffic.failed)


def _operator(run: Run, *words: str) -> None:
    run.say(f"$ kubectl -n kvline-system {' '.join(words)}")
    run.cluster.kubectl(*OPERATOR, *words)
    run.cluster.kubectl(*OPERATOR, *ROLLED_OUT)


def _outdated(run: Run, wanted: bool) -> None:
    """Waits until the new operator has seen the service."""
    end = time.monotonic() + 120
    while bool(run.service.status()["rollout"].get("imageOutdated")) != wanted:
        if time.monotonic() > end:
            raise ClusterError(f"imageOutdated is not {wanted} after 120 s")
        time.sleep(run.shape.poll_seconds)


def _living(run: Run) -> dict[str, int]:
    return {p["metadata"]["name"]: restarts(p) for p in run.service.pods()}


def drain(run: Run) -> None:
    """A service with one replica is evicted, and waits for a node. Only its pod is drained: the
    operator, which reports it, has no other node here."""
    pod = run.serving_pod()
    node, selected = pod["spec"]["nodeName"], f"--pod-selector=kvline.dev/service={run.shape.name}"
    words = ("drain", node, selected, "--delete-emptydir-data", "--timeout=180s")
    try:
        run.say(f"$ kubectl {' '.join(words)}")
        print(run.cluster.kubectl(*words).stdout.rstrip())
        run.eventually_says("Ready", 60, status="False", reason="Unschedulable")
        capacity = run.service.status()["capacity"]
        run.expect(capacity["serving"] is False, "the status says that nothing serves")
    finally:
        run.say(f"$ kubectl uncordon {node}")
        run.cluster.kubectl("uncordon", node)
    run.service.watch(
        lambda s: is_ready(s) and any(is_pod_ready(p) for p in run.service.pods()),
        run.shape.seconds,
        says="Ready",
    )
    run.serving_pod()
    run.say("serving again")
