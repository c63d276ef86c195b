"""The operator with hundreds of services: a real control plane with Kubernetes' default limits,
kwok nodes and pods, fake engines that send every kind of report, and the operator as shipped, with
its own rights.

KVLINE_SCALE=100,1000: numbers of services; KVLINE_BENCH_SECONDS: time without any change.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import binaries
import crd
import yaml
from local import NODE, LocalCluster
from paths import BIN
from record import ROOT, record, table

from kvline_contract.names import KIND, LABEL_SERVICE
from kvline_kubectl.cluster import connect

SIZES = [int(n) for n in os.environ.get("KVLINE_SCALE", "100,1000").split(",")]
QUIET = int(os.environ.get("KVLINE_BENCH_SECONDS", "600"))
PORT = 18099
PODS = "198.18.128.0/17"
RATE = 100  # creations a second
SAMPLES = 100
PLAYS = ("shrunk", "small", "outofmemory", "modelinvalid")  # a few among many good ones
BARS = {
    "children": 120,
    "latency": 1,
    "memory": 256,
    "writes": 0,
    "cpu": 1,
    "first": 10,
    "all": 60,
    "again": 0,
    "reconcile": 50,
    "api": 1000,
}


class Place:
    """One cluster with its fakes and its operator."""

    def __init__(self) -> None:
        self.cluster = LocalCluster("bench", "control", limits=())
        self.processes: list[subprocess.Popen[bytes]] = []
        self.operator: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # the operator's, as it ships

    def up(self) -> None:
        binaries.ensure("kwok", print)
        self.cluster.down()
        self.cluster.up(print)
        kubectl = self.cluster.kubectl
        crd.define(kubectl)
        text = (ROOT / "manifests" / "install.yaml").read_text()
        shipped = [d for d in yaml.safe_load_all(text) if d]
        rights = [d for d in shipped if d["kind"] != "Deployment"]
        (pod,) = (d["spec"]["template"]["spec"] for d in shipped if d["kind"] == "Deployment")
        (container,) = pod["containers"]
        self.environment = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        kubectl("apply", "-f", "-", input=yaml.safe_dump_all(rights))
        kubectl("create", "namespace", "scale")
        self.cluster.claim("scale", ROOT)  # nothing is read from it
        node = {"apiVersion": "v1", "kind": "Node"}
        # The claim's volume is on a node of this name; each of them says it is that one.
        labels = {"kubernetes.io/hostname": NODE}
        nodes = [{**node, "metadata": {"name": f"fake-{n}", "labels": labels}} for n in range(10)]
        kubectl("apply", "-f", "-", input=yaml.safe_dump_all(nodes))
        self.cluster.network.run(["ip", "route", "add", "local", PODS, "dev", "lo"])
        stages = ROOT / "tests" / "conformance" / "stages.yaml"
        words = ["--kubeconfig", str(self.cluster.kubeconfig), "--manage-all-nodes=true"]
        words += ["--node-lease-duration-seconds=40"]
        words += [f"--cidr={PODS.replace('.0/', '.1/')}", f"--config={stages}"]
        self._start([str(BIN / "kwok"), *words], "kwok")
        self._start([sys.executable, str(ROOT / "tests" / "conformance"), "fake"], "fake")
        self.kube = connect(None, str(self.cluster.kubeconfig), "scale").kube

    def _start(
        self,
        command: list[str],
        name: str,
        kubeconfig: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> Any:
        used = str(kubeconfig or self.cluster.kubeconfig)
        log = (self.cluster.state / "log" / f"{name}.log").open("ab")
        made = subprocess.Popen(
            self.cluster.network.command(command),
            env={**os.environ, **(environment or {}), "KUBECONFIG": used},
            stdout=log,
            stderr=log,
        )
        self.processes.append(made)
        return made

    def start_operator(self) -> None:
        account = self.cluster.kubeconfig_of("kvline-system", "kvline-operator")
        command = [sys.executable, "-m", "kvline_operator", "--allow-image-tags"]
        command += ["--default-image", "local/server:x", "--probe-port", str(PORT)]
        environment = {**self.environment, "KVLINE_POD_NAME": "operator"}  # as after a restart
        self.operator = self._start(command, "operator", account, environment)

    def kill_operator(self) -> None:
        assert self.operator is not None
        self.operator.send_signal(signal.SIGKILL)
        self.operator.wait()

    def down(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.cluster.down()

    def metrics(self) -> str:
        """Empty while the operator does not answer yet."""
        url = f"http://{self.cluster.network.inner}:{PORT}/metrics"
        try:
            return str(urllib.request.urlopen(url, timeout=10).read().decode())
        except OSError:
            return ""

    def value(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", self.metrics(), re.M)
        return sum(map(float, found))

    def count(self, path: str) -> int:
        """How many there are, without reading them."""
        page = json.loads(self.kube.read(path, [("limit", "1")]))
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)


def body(name: str) -> dict[str, Any]:
    spec = {"model": {"source": "pvc://models/fake"}, "resources": {"memory": "256Mi"}}
    meta = {"name": name, "namespace": "scale"}
    return {
        "apiVersion": "serving.kvline.dev/v1alpha1",
        "kind": KIND,
        "metadata": meta,
        "spec": spec,
    }


def name(number: int) -> str:
    return f"{PLAYS[number // 50 % len(PLAYS)] if number % 50 == 7 else 'good'}-{number}"


def until(check: Callable[[], Any], seconds: float, what: str, pause: float = 0.5) -> float:
    started = time.monotonic()
    while not check():
        if time.monotonic() - started > seconds:
            raise SystemExit(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause)
    return time.monotonic() - started


def create(place: Place, many: int) -> float:
    """Seconds from the first creation to the last child."""
    started = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        for number in range(many):
            time.sleep(max(0.0, started + number / RATE - time.monotonic()))
            pool.submit(place.kube.create, body(name(number)))
    print(f"{many} created in {time.monotonic() - started:.0f} s", flush=True)
    where = "/apis/apps/v1/namespaces/scale/deployments"
    until(lambda: place.count(where) >= many, 1800, "all Deployments")
    took = time.monotonic() - started
    for path, extra in (
        ("/api/v1/namespaces/scale/services", 0),
        ("/api/v1/namespaces/scale/serviceaccounts", 1),
        ("/apis/policy/v1/namespaces/scale/poddisruptionbudgets", 0),
        ("/apis/networking.k8s.io/v1/namespaces/scale/networkpolicies", 0),
        ("/apis/apps/v1/namespaces/scale/controllerrevisions", 0),
    ):
        have = place.count(path)
        if have != many + extra:
            raise SystemExit(f"{path}: {have}, not {many + extra}")
    return took


def settled(place: Place, many: int) -> bool:
    """Every play has come to its end."""
    text = place.metrics()
    ready = len(re.findall(r'condition\{.*type="Ready"\} 1\.0', text))
    ended = len(re.findall(r'reason="(?:OutOfMemory|Invalid)",.*type="Ready"\} 0\.0', text))
    print(f"  {ready} serve, {ended} have failed", flush=True)
    return ready + ended >= many


def quiet(place: Place, seconds: float, keep: float = 10) -> tuple[float, float]:
    """Writes and share of a core while nothing is changed."""
    before, still = -1.0, 0.0
    while still < keep:  # settled: so long without a write
        time.sleep(1)
        now = place.value("kvline_api_writes_total")
        still, before = (still + 1, now) if now == before else (0.0, now)
    busy, started = cpu(place), time.monotonic()
    time.sleep(seconds)
    share = (cpu(place) - busy) / (time.monotonic() - started)
    return place.value("kvline_api_writes_total") - before, 100 * share


def pid(place: Place) -> int:
    assert place.operator is not None
    return place.operator.pid  # nsenter becomes its program


def cpu(place: Place) -> float:
    """Seconds of CPU that the operator has used."""
    fields = Path(f"/proc/{pid(place)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(place: Place) -> float:
    """MiB resident at most."""
    text = Path(f"/proc/{pid(place)}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) / 1024


def latencies(place: Place) -> list[float]:
    """Seconds from a creation to its Deployment, one at a time."""
    out = []
    for number in range(SAMPLES):
        service = f"late-{number}"
        started = time.monotonic()
        place.kube.create(body(service))
        selector = f"{LABEL_SERVICE}={service}"
        found = partial(place.kube.select, "Deployment", "scale", selector)
        until(found, 30, service, pause=0.01)
        out.append(time.monotonic() - started)
        time.sleep(0.3)
    return sorted(out)


def p99(place: Place, name: str) -> float:
    """Milliseconds that 99 of 100 stayed below: the bound of a histogram's bucket."""
    found = re.findall(rf'^{name}_bucket\{{le="(\S+)"\}} (\S+)$', place.metrics(), re.M)
    counts = [(float(bound), float(count)) for bound, count in found]
    return 1e3 * next(bound for bound, count in counts if count >= 0.99 * counts[-1][1])


def restart(place: Place, many: int) -> tuple[float, float, float]:
    """Seconds to the first and the last reconcile, and the writes until then."""
    place.kill_operator()
    started = time.monotonic()
    place.start_operator()
    done = 'kvline_reconciles_total{result="ok"}'
    until(lambda: place.value(done) >= 1, 120, "the first reconcile", 0.2)
    first = time.monotonic() - started
    known = r'kvline_service_replicas\{[^}]*state="wanted"\}'
    until(lambda: len(re.findall(known, place.metrics())) >= many, 600, "all reconciles")
    return first, time.monotonic() - started, place.value("kvline_api_writes_total")


def one(many: int) -> list[list[str]]:
    place = Place()
    try:
        place.up()
        place.start_operator()
        until(lambda: place.metrics(), 60, "the operator")
        found = {"children": create(place, many)}
        until(lambda: settled(place, many), 1800, "every play's end", 5)
        found["writes"], found["cpu"] = quiet(place, QUIET)
        found["first"], found["all"], found["again"] = restart(place, many)
        found["reconcile"] = p99(place, "kvline_reconcile_cpu_seconds")
        found["waited"] = p99(place, "kvline_reconcile_seconds")
        found["api"] = p99(place, "kvline_api_call_seconds")
        quiet(place, 0)
        late = latencies(place)
        found["latency"], found["slowest"] = late[SAMPLES * 99 // 100 - 1], late[-1]
        found["memory"] = memory(place)
    finally:
        place.down()
    return report(many, found)


UNITS = {
    "children": ("created at 100/s to the last child", "s"),
    "latency": (f"creation to Deployment, idle operator, p99 of {SAMPLES}", "s"),
    "slowest": ("the same, the slowest", "s"),
    "memory": ("operator, resident at most", "MiB"),
    "writes": (f"writes in {QUIET} s without a change", "writes"),
    "cpu": ("share of a core meanwhile", "%"),
    "first": ("restart to the first reconcile", "s"),
    "all": ("restart to the last of the first reconciles", "s"),
    "again": ("writes of a restart", "writes"),
    "reconcile": ("a reconcile without a change, its CPU, p99 of a restart's, below", "ms"),
    "waited": ("the same, with all that it waits for, below", "ms"),
    "api": ("an API call, p99 of a restart's, below", "ms"),
}


def report(many: int, found: dict[str, float]) -> list[list[str]]:
    rows = []
    for key, (text, unit) in UNITS.items():
        value = found[key]
        record(f"operator-{many}-{key}", value, unit, (value, value))
        bar = f"{BARS[key]} {unit}" if key in BARS else ""
        rows.append([str(many), text, f"{value:.2f} {unit}", bar])
    return rows


def run() -> None:
    rows = [row for many in SIZES for row in one(many)]
    table("The operator with many services", ["services", "figure", "value", "bar"], rows)
