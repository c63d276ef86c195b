"""Steps: changes of a spec on the GPU that the service has, and beside it where there are two."""

from __future__ import annotations

import time
from typing import Any

from errors import ClusterError
from gpu_figures import ROLLBACK_GAP, ROLLOUT_GAP
from gpu_processes import ENGINE, find, gpu_of
from gpu_run import NotRun, Run, is_pod_ready
from gpu_traffic import Traffic
from service import Service, is_ready, is_rejected, is_up_to_date

Object = dict[str, Any]
REVISION = "kvline.dev/revision"


def worse(run: Run) -> None:
    """Recreate on the one GPU: the old replica has to end before the new one is measured."""
    service, before = run.service, run.tokens()
    run.serving_pod()
    stable = service.status()["rollout"]["stableRevision"]
    with run.cluster.service(service.name) as url, Traffic(url, service.name) as traffic:
        began = time.monotonic()
        service.change(run.shape.worse)
        verdict = service.watch(is_rejected, run.shape.seconds, began)
        service.watch(lambda s: is_rejected(s) and is_ready(s), run.shape.seconds, began)
        answers_again(traffic, run.shape.seconds)
    rollout = service.status()["rollout"]
    gate = rollout["gate"]
    service.show_gate("RevisionRejected")
    run.expect(gate["measured"] < gate["required"], "the gate has measured fewer KV tokens")
    run.expect(rollout["stableRevision"] == stable, f"the old revision {stable} serves again")
    run.expect(run.tokens() >= 0.95 * before, f"{run.tokens()} KV tokens as before ({before})")
    run.say(f"rejected after {verdict:.1f} s; {traffic.summary()}")
    run.figures.record(ROLLBACK_GAP, traffic.gap())
    run.say("and the change is taken back:")
    pods = [p["metadata"]["uid"] for p in service.pods()]
    service.change(undone(run.shape.worse))
    service.watch(is_up_to_date, 60)
    run.expect([p["metadata"]["uid"] for p in service.pods()] == pods, "which moves no pod")


def undone(change: Object) -> Object:
    """The merge patch that takes back a change of fields that the spec does not have."""
    return {k: undone(v) if isinstance(v, dict) else None for k, v in change.items()}


def answers_again(traffic: Traffic, seconds: float) -> None:
    """Waits for answers from now on, so that a gap that began before has an end."""
    count, end = len(traffic.answered), time.monotonic() + seconds
    while len(traffic.answered) < count + 3:
        if time.monotonic() > end:
            raise ClusterError(f"no answer for {seconds:.0f} s; the last: {traffic.failed[-1:]}")
        time.sleep(0.1)


def better(run: Run) -> None:
    service = run.service
    run.serving_pod()
    if run.shape.better["engine"].items() <= service.get()["spec"]["engine"].items():
        raise ClusterError("the spec has this change already: run step apply first")
    before = service.status()["rollout"]["stableRevision"]
    with run.cluster.service(service.name) as url, Traffic(url, service.name) as traffic:
        began = time.monotonic()
        service.change(run.shape.better)
        took = service.watch(is_up_to_date, run.shape.seconds, began)
        answers_again(traffic, run.shape.seconds)
    gate = service.status()["rollout"]["gate"]
    service.show_gate("GatePassed")
    run.expect(gate["result"] == "Passed", "the gate has let it pass")
    run.expect(service.status()["rollout"]["stableRevision"] != before, "the new revision serves")
    run.say(f"UpToDate after {took:.1f} s; {traffic.summary()}")
    run.figures.record(ROLLOUT_GAP, traffic.gap())


def surge(run: Run) -> None:
    """Both revisions side by side, and then two services, each with a GPU."""
    if run.cluster.gpus == 1:
        raise NotRun("one GPU")
    service = run.service
    run.serving_pod()
    if run.shape.surge["engine"].items() <= service.get()["spec"]["engine"].items():
        raise ClusterError("the spec has this change already: run step apply first")
    seen: set[frozenset[str]] = set()

    def passed(found: Object) -> bool:
        pods = service.pods()
        seen.add(frozenset(p["metadata"]["labels"][REVISION] for p in pods if _runs(p)))
        return is_up_to_date(found) and len(pods) == 1

    service.change({"rollout": {"strategy": "Surge"}})
    with (
        run.cluster.service(service.name) as url,
        Traffic(url, service.name, patient=True, stream=True) as traffic,
    ):
        service.change(run.shape.surge)
        service.watch(passed, run.shape.seconds)
    service.show_gate("GatePassed")
    run.expect(any(len(revisions) == 2 for revisions in seen), "both revisions ran side by side")
    run.say(f"streams: {traffic.summary()}")
    run.expect(bool(traffic.answered) and not traffic.failed, "no request failed", traffic.failed)
    service.change({"rollout": {"strategy": "Recreate"}})
    _second_service(run)


def _runs(pod: Object) -> bool:
    return str(pod["status"].get("phase")) == "Running"


def _second_service(run: Run) -> None:
    other = Service(run.cluster, f"{run.shape.name}-2", run.shape.poll_seconds)
    run.apply(other.name, run.shape.spec)
    other.watch(is_ready, run.shape.seconds)
    print(run.cluster.kubectl("get", "kvl", "-o", "wide").stdout.rstrip())
    pods = [*run.service.pods(), *other.pods()]
    run.expect(len(pods) == 2 and all(is_pod_ready(p) for p in pods), "two services serve at once")
    if run.cluster.gpus:
        gpus = {gpu_of(find(p["metadata"]["uid"], ENGINE)) for p in pods}
        run.expect(len(gpus) == 2, f"each on a GPU of its own: {', '.join(sorted(gpus))}")
    run.delete(other)
