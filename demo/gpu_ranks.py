"""Step: one model over several GPUs of the node, each with a rank of the pod."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

from gpu_faults import is_back, show_end
from gpu_processes import RANK, find
from gpu_run import NotRun, Run
from gpu_start import show_stages
from service import Service, condition, is_ready, is_up_to_date

Object = dict[str, Any]


def ranks(run: Run) -> None:
    count = run.shape.ranks["gpus"]
    if run.cluster.gpus and run.cluster.gpus < count:
        raise NotRun(f"it needs {count} GPUs, {run.cluster.gpus} are here")
    if run.service.get():
        run.delete(run.service)  # it has one of the GPUs
    service = Service(run.cluster, f"{run.shape.name}-ranks", run.shape.poll_seconds)
    began = time.monotonic()
    run.apply(service.name, {**run.shape.spec, "resources": run.shape.ranks})
    took = service.watch(is_ready, run.shape.seconds, began, says="CapacityMeasured")
    run.say(f"Ready after {took:.1f} s")
    (pod,) = service.pods()
    show_stages(run, pod["status"]["podIP"], "sizing-ranks.json")
    service.watch(is_up_to_date, 60)
    _show(run, service, count)
    with run.cluster.service(service.name) as url:
        words = (url, service.name, str(run.shape.vocabulary), str(run.shape.requests))
        rate = float(run.python("bench/load.py", *words))
    run.say(f"r512 through the Service: {rate:,.0f} tokens/s, input and output")
    _lose(run, service, pod)
    run.delete(service)


def _show(run: Run, service: Service, count: int) -> None:
    print(run.cluster.kubectl("get", "kvl", "-o", "wide").stdout.rstrip())
    for word in ("status", "explain"):
        text = run.python("-m", "kvline_kubectl", word, service.name)
        run.say(f"$ kubectl kvline {word} {service.name}")
        print("\n".join(f"      {line}".rstrip() for line in text.splitlines()))
        run.save(f"kvline-{word}-ranks.txt", text)
    capacity = service.status()["capacity"]
    found = capacity["ranks"]
    run.expect([rank["rank"] for rank in found] == list(range(count)), f"memory of {count} ranks")
    totals = [sum(part["mib"] for part in rank["parts"]) for rank in found]
    run.expect(
        totals == [rank["totalMiB"] for rank in found],
        "each rank's parts add up to what it has",
        totals,
    )
    if run.cluster.gpus:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        caches = [p["mib"] for rank in found for p in rank["parts"] if p["name"] == "kv-cache"]
        run.expect(
            len(used) >= count and min(map(int, used[:count])) > min(caches),
            f"a KV cache of {caches[0]} MiB on each GPU; MiB used: {', '.join(used)}",
            used,
        )


def _lose(run: Run, service: Service, pod: Object) -> None:
    """A rank's process is killed, as a fault of its GPU ends it: the pod ends as a whole, says
    which, starts again from its record, and no revision is blamed."""
    before, tokens = service.status()["rollout"], service.status()["capacity"]["kvTokens"]
    pid = find(pod["metadata"]["uid"], RANK)
    run.say(f"$ kill -9 {pid}  # a rank of {pod['metadata']['name']}, on its node")
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    took = service.watch(
        lambda s: is_back(service, s, pod), run.shape.seconds, began, says="Progressing"
    )
    show_end(run, service)
    run.expect(_lost(service), "the container ended with RankLost")
    after, capacity = service.status()["rollout"], service.status()["capacity"]
    run.expect(after["stableRevision"] == before["stableRevision"], "the same revision serves")
    run.expect(condition(service.get(), "CapacityStable")["status"] == "True", "CapacityStable")
    run.expect(
        capacity["kvTokens"] >= 0.995 * tokens,
        f"{capacity['kvTokens']} KV tokens, {tokens} before ({capacity['source']})",
    )
    run.say(f"killed to Ready: {took:.1f} s")


def _lost(service: Service) -> bool:
    (pod,) = service.pods()
    states = [c.get("lastState", {}) for c in pod["status"]["containerStatuses"]]
    return any("RankLost" in str(state.get("terminated", {}).get("message")) for state in states)
