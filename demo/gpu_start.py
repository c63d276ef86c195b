"""Steps: the bare machine, a node with a GPU, and the first start of a service on it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from errors import ClusterError
from gpu_figures import APPLY_READY, NODE_READY, SERVICE_OF_HTTP, STATUS_OF_BARE
from gpu_processes import SUPERVISOR, age, find
from gpu_run import NotRun, Run
from install import install as install_operator
from service import Service, is_ready, is_up_to_date

GPU = "nvidia.com/gpu"
BARE_TOKENS, BARE_RATE = "bare KV tokens", "bare tokens/s"
SHOWN_MS = 20  # of a stage


def model(run: Run) -> None:
    run.cluster.model(run.say)
    if run.shape.written and not (run.folder / "tokenizer.json").is_file():
        run.python("bench/load.py", "folder", run.shape.folder, str(run.folder))
    run.say(f"{run.folder}")


def bare(run: Run) -> None:
    """The figure that a pod's is compared with, of the same machine and minute."""
    _check_engine(run)
    words = ["size", "--model", str(run.folder), *run.shape.flags, "--json"]
    run.say(f"$ kvline-server {' '.join(words)}")
    report = json.loads(run.python("-m", "kvline_server", *words))
    for warning in report.get("warnings", []):  # such as that kernels are missing here
        run.say(f"warning: {warning}")
    tokens = report["result"]["kvTokens"]
    run.figures.keep(BARE_TOKENS, tokens)
    run.say(f"{tokens} KV tokens on the bare machine")


def _check_engine(run: Run) -> None:
    if not run.cluster.has_engine:
        raise NotRun("the engine's packages for a GPU are in the image alone; PARTS= brings them")


def bare_http(run: Run) -> None:
    _check_engine(run)
    with _served(run) as url:
        rate = _r512(run, url)
    run.figures.keep(BARE_RATE, rate)
    run.say(f"r512 over bare HTTP: {rate:,.0f} tokens/s, input and output")


@contextmanager
def _served(run: Run) -> Iterator[str]:
    """The service's server on the bare machine, without Kubernetes."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        port, internal = (str(probe.getsockname()[1]) for probe in (first, second))
    words = ["serve", "--model", str(run.folder), "--served-name", run.shape.name]
    words += ["--port", port, "--internal-port", internal, *run.shape.flags]
    run.say(f"$ kvline-server {' '.join(words)}")
    run.out.mkdir(parents=True, exist_ok=True)
    path = run.out / "bare-http.log"
    with path.open("w") as log:
        server = run.start("-m", "kvline_server", *words, stdout=log, stderr=log)
        try:
            if not _is_ready(server, f"http://127.0.0.1:{internal}/readyz", run.shape.seconds):
                raise ClusterError(
                    f"the bare server is not ready; {path}:\n{path.read_text()[-1500:]}"
                )
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()  # not killed: what holds the GPU must have ended
            server.wait(60)


def _is_ready(server: subprocess.Popen[str], url: str, seconds: float) -> bool:
    """Waits for it; False if it has ended or takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=2)
            return True
        time.sleep(0.1)
    return False


def _r512(run: Run, url: str) -> float:
    words = (url, run.shape.name, str(run.shape.vocabulary), str(run.shape.requests))
    return float(run.python("bench/load.py", *words))


def node(run: Run) -> None:
    """From programs that are built to a GPU that pods can request."""
    run.cluster.cluster.ensure_programs(run.say)
    was_up = _allocatable(run) is not None
    began = time.monotonic()
    run.cluster.up(run.say)
    while (found := _allocatable(run)) is None or found < run.cluster.gpus:
        if time.monotonic() > began + 120:
            raise ClusterError(f"the node offers {found} of {run.cluster.gpus} GPUs after 120 s")
        time.sleep(0.1)
    print(run.cluster.kubectl("get", "nodes", "-o", "wide").stdout.rstrip())
    took, unpacked = time.monotonic() - began, run.cluster.unpacked_seconds
    if was_up:
        run.say("the cluster was up already")
    elif unpacked or not run.cluster.gpus:
        run.say(f"of it {unpacked:.1f} s to unpack the parts")
        run.figures.record(NODE_READY, took + unpacked)
    else:
        run.say(f"ready after {took:.1f} s; no figure, which is of a machine that unpacks parts")


def _allocatable(run: Run) -> int | None:
    """GPUs of the Ready node; None without one."""
    try:
        items = json.loads(run.cluster.kubectl("get", "nodes", "-o", "json").stdout)["items"]
    except ClusterError:
        return None
    ready = [
        item
        for item in items
        if {"type": "Ready", "status": "True"}.items()
        <= next(c for c in item["status"]["conditions"] if c["type"] == "Ready").items()
    ]
    return sum(int(i["status"]["allocatable"].get(GPU, 0)) for i in ready) if ready else None


def install(run: Run) -> None:
    run.cluster.images(run.say)
    install_operator(run.cluster, run.say)
    run.cluster.claim(run.say)


def chat(run: Run) -> None:
    """A real model, before the GPU is another service's."""
    if not (run.cluster.models / "smollm2" / "config.json").is_file():
        raise NotRun("SmolLM2's folder is not here")
    if run.cluster.gpus == 1 and run.service.get():
        raise NotRun(f"{run.shape.name} has the one GPU; this step is for before it is applied")
    service = Service(run.cluster, "smollm2", run.shape.poll_seconds)
    source = {"source": "pvc://models/smollm2"}
    run.apply(service.name, {"model": source, "resources": run.shape.chat})
    service.watch(is_ready, run.shape.seconds)
    service.show_budget()
    run.expect("Paris" in service.chat(), "an answer that names Paris")
    run.delete(service)


def apply(run: Run) -> None:
    service = run.service
    if service.get():
        run.delete(service)  # its record too, so that the start is a first one
    began = time.monotonic()
    run.apply(service.name, run.shape.spec)
    took = service.watch(is_ready, run.shape.seconds, began, says="CapacityMeasured")
    pod = service.pods()[0]
    started = time.monotonic() - began - age(find(pod["metadata"]["uid"], SUPERVISOR))
    run.say(f"the container's process started after {started:.1f} s, Ready after {took:.1f} s")
    show_stages(run, pod["status"]["podIP"])
    run.figures.record(APPLY_READY, took)
    capacity = service.status()["capacity"]
    run.expect(capacity["source"] == "Measured", "a KV budget that was searched for, not recorded")
    service.watch(is_up_to_date, 60)


def show_stages(run: Run, address: str, saved: str = "sizing.json") -> None:
    """From the pod's own sizing report."""
    text = run.cluster.run_on_node(["curl", "-sf", f"http://{address}:8001/sizing"]).stdout
    run.save(saved, text)
    report = json.loads(text)
    for stage in report["stages"]:
        if stage["ms"] >= SHOWN_MS:
            detail = stage.get("detail") or ""
            run.say(f"{stage['ms'] / 1000:7.2f} s  {stage['name']:<24}{detail}")
    run.say(f"{report['result']['loopMs'] / 1000:7.2f} s  from the start of loading to validated")


def status(run: Run) -> None:
    service = run.service
    run.serving_pod()
    print(run.cluster.kubectl("get", "kvl", "-o", "wide").stdout.rstrip())
    capacity = service.status()["capacity"]
    seen = capacity["provenance"]
    if run.cluster.gpus:
        run.expect(bool(seen["gpu"] and seen["driver"]), f"{seen['gpu']}, driver {seen['driver']}")
    tokens = run.figures.kept(BARE_TOKENS)
    if tokens is None:
        run.say("not compared with the bare machine: step bare has not run")
    else:
        run.say(f"{capacity['kvTokens']} KV tokens in status, {tokens} on the bare machine")
        run.figures.record(STATUS_OF_BARE, capacity["kvTokens"] / tokens)
    for words in (["status"], ["status", service.name], ["explain", service.name]):
        text = run.python("-m", "kvline_kubectl", *words)
        run.say(f"$ kubectl kvline {' '.join(words)}")
        print("\n".join(f"      {line}".rstrip() for line in text.splitlines()))
        run.save(f"kvline-{'-'.join(words)}.txt", text)
    described = run.cluster.kubectl("describe", "kvl", service.name).stdout
    run.save("describe.txt", described)
    run.expect("Kv Tokens" in described, "kubectl describe has the KV tokens")
    run.save("pods.txt", run.cluster.kubectl("describe", "pods", "-n", "default").stdout)
    run.save("log.txt", run.cluster.kubectl("logs", f"service/{service.name}").stdout)
    _save_page(run)


def _save_page(run: Run) -> None:
    """The operator's page as files, for a web server to show at their own paths."""
    base = run.cluster.page()
    names = ("", f"services/default/{run.shape.name}")
    pages = {name: _read(base + name) for name in names}
    run.expect(run.shape.name in pages[names[1]], "the operator's page shows the service")
    for name, text in pages.items():
        run.save(f"page/{name}/index.html", text)
        for file in set(re.findall(r'"/(static/[\w.-]+)"', text)):
            run.save(f"page/{file}", _read(base + file))
    run.say(f"texts and page: {run.out}")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def load(run: Run) -> None:
    run.serving_pod()
    with run.cluster.service(run.shape.name) as url:
        rate = _r512(run, url)
    bare_rate = run.figures.kept(BARE_RATE)
    run.say(f"r512 through the Service: {rate:,.0f} tokens/s, input and output")
    if bare_rate is None:
        run.say("not compared with bare HTTP: step bare-http has not run")
    else:
        run.say(f"over bare HTTP: {bare_rate:,.0f} tokens/s")
        run.figures.record(SERVICE_OF_HTTP, rate / bare_rate)
