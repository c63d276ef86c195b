"""A real control plane (API server, controller manager, scheduler) and the real operator.

There is no kubelet: a test plays the node by writing pod status, and serves reports over real HTTP
on loopback addresses, which the operator reads as it would a pod's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import forked
import yaml
from api import Api
from waiting import answered, eventually, limit

from kvline_contract.codec import dumps
from kvline_contract.launch import GateFile, LaunchConfig
from kvline_contract.load import Load
from kvline_contract.memory import Memory, MemoryV1
from kvline_contract.names import (
    GATE_FILE,
    LABEL_PREPARES,
    LABEL_REVISION,
    LABEL_SERVICE,
    LAUNCH_FILE,
    OPEN_GATE_PATH,
    SIZING_PATH,
    gate_name,
)
from kvline_contract.report import (
    REPORT_VERSION,
    Attempt,
    Effective,
    Outcome,
    Result,
    SizingReport,
    Source,
    State,
    served,
)

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/kvline-server:test"
RESYNC = 20.0  # seconds between resyncs of the tests' operators, where a test gives no others
LEASE = "kvline-operator-"  # and the namespace
CHILDREN = (
    "serviceaccounts",
    "services",
    "configmaps",
    "deployments",
    "controllerrevisions",
    "poddisruptionbudgets",
    "networkpolicies",
)


@dataclass
class Space:
    """One test's namespace."""

    cluster: Any
    name: str

    def kubectl(self, *words: str, input: str | None = None, check: bool = True) -> Any:
        return self.cluster.kubectl("-n", self.name, *words, input=input, check=check)

    @property
    def api(self) -> Api:
        return _api(self.cluster.kubeconfig)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.api.get(self.api.path(kind, self.name, name))

    def list(self, kind: str) -> list[dict[str, Any]]:
        return list((self.api.get(self.api.path(kind, self.name)) or {})["items"])

    def apply(self, name: str = "chat", check: bool = True, **spec: Any) -> Any:
        return self.kubectl("apply", "-f", "-", input=manifest(name, **spec), check=check)

    def kvline(self, *words: str, check: bool = True) -> Any:
        """`kubectl kvline`, as an administrator, on a wide terminal."""
        command = [sys.executable, "-m", "kvline_kubectl", *words, "-n", self.name]
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "200"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit(300)
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert not check or done.returncode == 0, done.stderr
        return done

    @property
    def lease(self) -> dict[str, Any]:
        """Of the operators of this namespace; empty while there is none."""
        found = self.api.get(self.api.path("lease", "kvline-system", LEASE + self.name))
        return dict(found["spec"]) if found is not None else {}

    @property
    def up_to_date(self) -> bool:
        """Of the service that most tests have."""
        return bool(self.condition("UpToDate").get("status") == "True")

    def condition(self, kind: str, name: str = "chat") -> dict[str, Any]:
        body = self.get("kvl", name) or {}
        for item in (body.get("status") or {}).get("conditions") or []:
            if item["type"] == kind:
                return dict(item)
        return {}


@cache
def _api(kubeconfig: Path) -> Api:
    return Api(kubeconfig)


def manifest(name: str = "chat", **spec: Any) -> str:
    base = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
    return json.dumps(
        {
            "apiVersion": "serving.kvline.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {**base, **spec},
        }
    )


def identity() -> list[dict[str, Any]]:
    """The operator's namespace, ServiceAccount and RBAC of install.yaml, without its Deployment."""
    text = (ROOT / "manifests" / "install.yaml").read_text()
    return [d for d in yaml.safe_load_all(text) if d["kind"] != "Deployment"]


class Operator:
    """The real operator as a process on this host, with the RBAC of install.yaml, for one
    namespace."""

    def __init__(
        self,
        space: Space,
        log: Path,
        extra: dict[str, str] | None = None,
        kubeconfig: Path | None = None,
    ) -> None:
        self.space = space
        self.log = log
        pki = space.cluster.kubeconfig.parent
        self.kubeconfig = kubeconfig or pki / "kvline-system-kvline-operator.kubeconfig"
        self.extra = extra or {}
        self.resync = RESYNC
        self.forks = True  # or its memory is all its own
        self.words: list[str] = []  # more of the command line
        self.prefix: list[str] = []  # before it
        from servers import free_port

        self.page_port, self.probe_port = 0, free_port()
        self.process: subprocess.Popen[bytes] | forked.Forked | None = None
        self.identity = f"{space.name}-{uuid.uuid4().hex[:5]}"  # kept over restarts

    def start(self) -> Operator:
        from servers import FAULTS

        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), **self.extra}
        environment["KVLINE_POD_NAME"] = self.identity
        if self.extra:
            environment["PYTHONPATH"] = str(FAULTS)
        words = ["--default-image", IMAGE, "--allow-image-tags", "--namespace", self.space.name]
        words += ["--poll-seconds", "0.3", "--load-seconds", "0.5"]
        words += ["--resync-seconds", str(self.resync), "--probe-port", str(self.probe_port)]
        words += ["--page-port", str(self.page_port)]
        words += ["--lease-name", LEASE + self.space.name]  # one per test
        words += self.words
        if self.forks and not (self.extra or self.prefix):
            self.process = forked.source().fork(words, environment, self.log)
            return self
        command = [*self.prefix, sys.executable, "-m", forked.MODULE, *words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return self

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        url = f"http://127.0.0.1:{self.probe_port}/metrics"
        with answered():
            text = urllib.request.urlopen(url, timeout=limit(10)).read().decode()
        return float(re.findall(rf"^{name} (\S+)$", text, re.M)[0])

    def health(self) -> str:
        """What its liveness probe answers: «ok», or what is wrong; empty while it is starting."""
        url = f"http://127.0.0.1:{self.probe_port}/healthz"
        try:
            with answered():
                return str(urllib.request.urlopen(url, timeout=limit(10)).read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""

    def is_well(self) -> bool:
        return self.health() == "ok"

    @property
    def writes(self) -> float:
        """To the API server since its start, without the Lease's."""
        return self.metric("kvline_api_writes_total")

    @property
    def reconciles(self) -> float:
        return self.metric("kvline_reconcile_seconds_count")

    def acts_once_more(self, name: str = "chat") -> None:
        """Returns once a reconcile that began after this call has ended: what the operator would do
        about all that is there now, it has done. For the only service of a namespace, which is
        touched twice: of its reconciles one runs at a time, so the second to end began after the
        call. Touched more often, its status could not be written for conflicts."""
        path = self.space.api.path("kvl", self.space.name, name)
        for _ in range(2):
            before = self.reconciles
            self.space.api.merge(path, {"metadata": {"annotations": {"touched": uuid.uuid4().hex}}})
            eventually(partial(self._has_reconciled_since, before))

    def _has_reconciled_since(self, before: float) -> bool:
        return self.reconciles > before

    def writes_nothing(self, name: str = "chat") -> bool:
        """Whether it has nothing left to do: two reconciles of all that is there write nothing."""
        before = self.writes
        self.acts_once_more(name)
        return self.writes == before

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(limit(20))


RANKS: tuple[Memory, ...] = (MemoryV1(100, 20, 10, 0, 50, 10, 10).upgraded(),)


def sizing_report(
    uid: str, state: State, tokens: int = 4096, ranks: tuple[Memory, ...] = RANKS
) -> SizingReport:
    result = None
    if state is State.VALIDATED:
        # One fingerprint for each number of ranks, as a server computes it.
        fingerprint = "f" * 32 if len(ranks) == 1 else f"{len(ranks)}".rjust(32, "f")
        result = Result(tokens, 512, Source.MEASURED, fingerprint, 90, 6000, 0, "t", ranks)
    attempt = Attempt(1, tokens, Outcome.SURVIVED if result else Outcome.RUNNING, None)
    effective = Effective(1024, 4, 512, 20, 128, 16, 64)
    return SizingReport(uid, "p", "r", 1, state, "t", "t", effective, (), (attempt,), result)


def worker() -> int:
    """The number of this pytest-xdist worker, from 0."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def own(name: str) -> str:
    """The name of this worker's own cluster."""
    return f"{name}-{worker() + 1}" if worker() else name


def _container(**status: Any) -> dict[str, Any]:
    """The status of a pod's container."""
    known = {"name": "server", "ready": False, "restartCount": 0, "image": IMAGE, "imageID": "x"}
    return {**known, **status}


class Node:
    """Plays the kubelet: pods get addresses on loopback, where their reports are served."""

    def __init__(self, space: Space) -> None:
        self.space = space
        # By address: the body of /sizing in the version that is asked for.
        self.answers: dict[str, Callable[[int], bytes]] = {}
        self.newest = REPORT_VERSION  # of a report, that the pods' image knows
        self.served: set[int] = set()  # versions of reports that were served
        self.ranks = RANKS  # of every replica, again from the first where it has more
        self.addresses: dict[str, str] = {}  # pod uid -> address
        self.was_ready: set[str] = set()  # pod uids
        self.considered: set[str] = set()  # uids of pods that the scheduler has considered
        self.crashes: Counter[str] = Counter()  # by pod uid
        self.posts: dict[tuple[str, str], str] = {}  # by address and path: the last POST's token
        self.counts: dict[str, int] = {}  # ranks of a replica, by revision
        self.load: Load | None = None  # the load that every replica reports
        self.fetches = True  # prepare Jobs succeed at once
        self.gates: dict[str, str] | None = None  # where files of volumes stay: by pod uid
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, (path, _, query) = b"", self.path.partition("?")
                answer = node.answers.get(self.connection.getsockname()[0])
                if path == SIZING_PATH and answer is not None:
                    version = min(served(query), node.newest)
                    node.served.add(version)
                    body = answer(version)
                elif path == "/load":
                    body = dumps(node.load).encode() if node.load is not None else b""
                with suppress(ConnectionError):  # an operator that was killed reads no more
                    self.send_response(200 if body else 503)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def do_POST(self) -> None:
                bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
                node.posts[self.connection.getsockname()[0], self.path] = bearer
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self._handler = Handler
        self._servers: list[ThreadingHTTPServer] = []

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _address(self, uid: str) -> str:
        """A loopback address for one pod, of this worker's range, with a server on it."""
        if uid not in self.addresses:
            self.addresses[uid] = f"127.0.{7 + worker()}.{len(self.addresses) + 1}"
            server = ThreadingHTTPServer((self.addresses[uid], 8001), self._handler)
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self.addresses[uid]

    def pods(self) -> list[dict[str, Any]]:
        """Running pods of services, without the operator's."""
        found = [p for p in self.space.list("pods") if not p["metadata"].get("deletionTimestamp")]
        found = [p for p in found if (p.get("status") or {}).get("phase") != "Failed"]
        return [p for p in found if LABEL_SERVICE in (p["metadata"].get("labels") or {})]

    def play(
        self,
        state: State,
        tokens: int = 4096,
        ready: bool | None = None,
        raw: bytes | None = None,
        only: Callable[[dict[str, Any]], bool] = lambda pod: True,
    ) -> None:
        """Every pod runs and reports `state`; it is ready when validated and its gate lets it,
        unless given."""
        self.fetch()
        for pod in self.pods():
            if not only(pod):
                continue
            uid = pod["metadata"]["uid"]
            address = self._address(uid)
            ranks = self.ranks_of(pod)
            self.answers[address] = partial(self._report, uid, state, tokens, raw, ranks)
            now = state is State.VALIDATED and self._may(pod, tokens) if ready is None else ready
            self.status(pod, address, now)

    def _report(
        self,
        uid: str,
        state: State,
        tokens: int,
        raw: bytes | None,
        ranks: tuple[Memory, ...],
        version: int,
    ) -> bytes:
        if raw is not None:
            return raw
        return sizing_report(uid, state, tokens, ranks).dumps(version).encode()

    def launch(self, pod: dict[str, Any]) -> LaunchConfig | None:
        """The launch file that a pod mounts; None where it is gone with its revision."""
        (name,) = (v["configMap"]["name"] for v in pod["spec"]["volumes"] if v["name"] == "launch")
        found = self.space.get("configmap", name)
        return LaunchConfig.parse(found["data"][LAUNCH_FILE]) if found is not None else None

    def ranks_of(self, pod: dict[str, Any]) -> tuple[Memory, ...]:
        """Memory of as many ranks as the pod is started with."""
        revision = pod["metadata"]["labels"][LABEL_REVISION]
        if revision not in self.counts:
            launch = self.launch(pod)
            self.counts[revision] = launch.tensor_parallel if launch is not None else 1
        return tuple(islice(cycle(self.ranks), self.counts[revision]))

    def jobs(self) -> list[dict[str, Any]]:
        """Pods of Jobs that have not ended."""
        found = (p for p in self.space.list("pods") if not p["metadata"].get("deletionTimestamp"))
        ours = (p for p in found if LABEL_PREPARES in (p["metadata"].get("labels") or {}))
        return [p for p in ours if p["status"].get("phase") not in ("Succeeded", "Failed")]

    def fetch(self) -> None:
        for pod in self.jobs() if self.fetches else ():
            self.end_job(pod, 0, "")

    def end_job(self, pod: dict[str, Any], code: int, message: str) -> None:
        """Ends a Job's pod."""
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed"}
        state = {"terminated": {**terminated, "message": message}}
        container = _container(name=pod["spec"]["containers"][0]["name"], state=state)
        phase = "Failed" if code else "Succeeded"
        self.patch(pod, {"phase": phase, "conditions": [], "containerStatuses": [container]})

    def _may(self, pod: dict[str, Any], tokens: int) -> bool:
        """Readiness as a pod computes it from its gate file, or from the operator's notice."""
        labels, uid = pod["metadata"]["labels"], pod["metadata"]["uid"]
        found = self.space.get(
            "configmap", gate_name(labels[LABEL_SERVICE], labels[LABEL_REVISION])
        )
        if found is None:
            return False
        text = found["data"][GATE_FILE]
        gate = GateFile.parse(text if self.gates is None else self.gates.setdefault(uid, text))
        notice = (self.addresses.get(uid, ""), f"{OPEN_GATE_PATH}?uid={uid}")
        is_open = gate.open or gate.knows(self.posts.get(notice, ""))
        if is_open and tokens >= gate.threshold():
            self.was_ready.add(uid)  # once ready, thresholds no longer apply
        return is_open and uid in self.was_ready

    def status(self, pod: dict[str, Any], address: str, ready: bool) -> None:
        started = {"running": {"startedAt": "2026-11-21T10:00:00Z"}}
        container = _container(ready=ready, started=True, state=started)
        conditions = [{"type": t, "status": str(ready)} for t in ("Ready", "ContainersReady")]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": conditions,
            "containerStatuses": [container],
        }
        self.patch(pod, status)

    def crash(self, pod: dict[str, Any], code: int, message: str) -> None:
        """Its server ends once more, with `code`, and waits to be started again."""
        uid = pod["metadata"]["uid"]
        reason = "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "message": message}
        container = _container(
            restartCount=self.crashes[uid],
            state={"waiting": {"reason": "CrashLoopBackOff"}},
            lastState={"terminated": terminated},
        )
        self.crashes[uid] += 1
        self.patch(pod, {"phase": "Running", "conditions": [], "containerStatuses": [container]})

    def end(self, pod: dict[str, Any], reason: str, message: str) -> None:
        """Makes a pod terminal, as the kubelet does: evicted, refused, or any other reason."""
        state = {"terminated": {"exitCode": 137, "reason": "Error"}}
        container = _container(restartCount=1, state=state)
        status = {"phase": "Failed", "reason": reason, "message": message, "conditions": []}
        self.patch(pod, {**status, "containerStatuses": [container]})

    def bind(self, pod: dict[str, Any], name: str = "gpu-1") -> None:
        """Binds a pod to a node, which need not exist."""
        meta = {"name": pod["metadata"]["name"], "namespace": self.space.name}
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        path = self.space.api.path("pods", self.space.name, meta["name"])
        self.space.kubectl(
            "create", "--raw", f"{path}/binding", "-f", "-", input=json.dumps(binding)
        )

    def patch(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        """Writes a pod's status; a pod that is deleted meanwhile is ignored."""
        api = self.space.api
        path = api.path("pods", self.space.name, pod["metadata"]["name"])
        if pod["metadata"]["uid"] not in self.considered:
            eventually(lambda: _considered(api.get(path)))
            self.considered.add(pod["metadata"]["uid"])
        api.merge(f"{path}/status", {"status": status})


def _considered(pod: dict[str, Any] | None) -> bool:
    """Whether the scheduler has set its condition, which it does once here, where no node is: set
    after a kubelet's status, it would say of a pod that ran that it is unschedulable."""
    if pod is None or pod["metadata"].get("deletionTimestamp"):
        return True
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "PodScheduled" for c in conditions)


def serve(space: Space, node: Node) -> None:
    """Applies the plain service and waits until it is validated."""
    space.apply()
    eventually(node.pods)
    node.play(State.VALIDATED)
    eventually(lambda: space.up_to_date)


def children(space: Any) -> dict[str, list[dict[str, Any]]]:
    """All objects with our label, without fields that change with every apply or by time."""
    out = {}
    for kind in CHILDREN:
        out[kind] = [
            item
            for item in space.list(kind)
            if (item["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by")
            == "kvline"
        ]
    return out
