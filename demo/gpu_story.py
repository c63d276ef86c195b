"""The story on one GPU, step by step. Each step works in a process of its own, because a machine
with a GPU may be there for minutes: what a later one needs is in the cluster or in the figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import gpu_faults
import gpu_ranks
import gpu_rollouts
import gpu_start
from errors import ClusterError
from gpu_run import NotRun, Run

Step = tuple[str, Callable[[Run], None]]
STEPS: dict[str, Step] = {
    "model": ("model folders", gpu_start.model),
    "bare": ("the KV budget on the bare machine, before the cluster has the GPU", gpu_start.bare),
    "bare-http": ("r512 over HTTP on the bare machine", gpu_start.bare_http),
    "node": ("a Kubernetes node and its GPU", gpu_start.node),
    "install": ("images, CRD and operator, a claim that holds the models", gpu_start.install),
    "chat": ("SmolLM2: real weights, a real answer", gpu_start.chat),
    "apply": ("kubectl apply: from a spec to a validated KV budget", gpu_start.apply),
    "status": ("what the status says, and where the memory goes", gpu_start.status),
    "load": ("r512 through the Service", gpu_start.load),
    "worse": ("a change that loses KV tokens: rejected", gpu_rollouts.worse),
    "better": ("a change that gains KV tokens: accepted", gpu_rollouts.better),
    "killed": ("the engine is killed", gpu_faults.killed),
    "neighbour": ("another program takes 20 GiB of the GPU", gpu_faults.neighbour),
    "deleted": ("the pod is deleted", gpu_faults.deleted),
    "upgrade": ("the operator is replaced: no serving pod moves", gpu_faults.upgrade),
    "drain": ("the node is drained", gpu_faults.drain),
    "surge": ("two GPUs: both revisions side by side, then two services", gpu_rollouts.surge),
    "ranks": ("two GPUs: one model over both, and a rank that is lost", gpu_ranks.ranks),
}


def play(run: Run, names: list[str]) -> None:
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise ClusterError(f"STEPS={','.join(unknown)}: expected some of {','.join(STEPS)}")
    run.cluster.check(run.say)
    try:
        for number, name in enumerate(names, 1):
            _step(run, f"[{number}/{len(names)}]", name)
    finally:
        run.figures.table()


def _step(run: Run, number: str, name: str) -> None:
    title, action = STEPS[name]
    print(f"\n{number} {name}: {title}", flush=True)
    began = time.monotonic()
    try:
        action(run)
    except NotRun as reason:
        run.say(f"not run: {reason}")
        return
    except Exception:
        with suppress(Exception):  # the step's own error is what a user has to see
            _save_trouble(run, name)
        raise
    run.say(f"done ({time.monotonic() - began:.1f} s)")


def _save_trouble(run: Run, name: str) -> None:
    """What a reader of a failed step asks for; the machine may be gone by then."""
    commands = (
        ("get", "pods", "-A", "-o", "wide"),
        ("describe", "kvl"),
        ("describe", "pods"),
        ("logs", "-l", f"kvline.dev/service={run.shape.name}", "--tail=50"),
        ("-n", "kvline-system", "logs", "deployment/kvline-operator", "--tail=50"),
    )
    texts = []
    for words in commands:
        with suppress(ClusterError):  # the cluster may be what fails
            texts.append(f"$ kubectl {' '.join(words)}\n{run.cluster.kubectl(*words).stdout}")
    run.save(f"failed-{name}.txt", "\n".join(texts))
    run.say(f"{run.out}/failed-{name}.txt has what the cluster says")
