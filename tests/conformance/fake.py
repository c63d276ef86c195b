"""Fake engines for every pod of a cluster: one server that distinguishes pods by the address of the
request, and a thread that sets annotations by which kwok makes a pod ready or ended. Runs in the
network namespace in which the pods' range is a local route."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from api import Api
from errors import ClusterError
from plays import Play

from kvline_contract.codec import dumps
from kvline_contract.launch import GateFile
from kvline_contract.names import (
    GATE_FILE,
    INTERNAL_PORT,
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_SERVICE,
    MANAGED_BY,
    SIZING_PATH,
    gate_name,
)
from kvline_contract.report import served

READY = "conformance.kvline.dev/ready"
EXIT = "conformance.kvline.dev/exit"
MESSAGE = "conformance.kvline.dev/message"
Object = dict[str, Any]


@dataclass
class Pod:
    namespace: str
    name: str
    uid: str
    service: str
    revision: str
    play: Play
    started: float
    published: bool = False  # annotations that kwok reads

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Fake:
    def __init__(self, api: Api) -> None:
        self.api = api
        self.pods: dict[str, Pod] = {}  # by address
        self.asked = 0
        self._hands = ThreadPoolExecutor(8, "hand")

    def run(self) -> None:
        fake = self

        class Handler(_Handler):
            owner = fake

        server = _Server(("0.0.0.0", INTERNAL_PORT), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=self._act, daemon=True).start()
        self._watch()

    def _watch(self) -> None:
        """Watches every pod of ours, without end."""
        ours = {"labelSelector": f"{LABEL_MANAGED_BY}={MANAGED_BY}"}
        while True:
            listed = self.api.get("/api/v1/pods", **ours) or {}
            for item in listed["items"]:
                self._see("ADDED", item)
            since = listed["metadata"]["resourceVersion"]
            for event in self.api.stream("/api/v1/pods", resourceVersion=since, **ours):
                if event["type"] == "ERROR":
                    break
                self._see(event["type"], event["object"])

    def _see(self, kind: str, body: Object) -> None:
        address = (body.get("status") or {}).get("podIP")
        if not address:
            return
        meta = body["metadata"]
        if kind == "DELETED" or meta.get("deletionTimestamp"):
            self.pods.pop(address, None)
        elif address not in self.pods or self.pods[address].uid != meta["uid"]:
            labels = meta["labels"]
            service = labels[LABEL_SERVICE]
            self.pods[address] = Pod(
                namespace=meta["namespace"],
                name=meta["name"],
                uid=meta["uid"],
                service=service,
                revision=labels[LABEL_REVISION],
                play=Play.of(service),
                started=time.monotonic(),
            )

    def _act(self) -> None:
        while True:
            waiting = [p for p in list(self.pods.values()) if not p.published]
            for _ in self._hands.map(self._try_to_tell, waiting):
                pass
            time.sleep(0.2)

    def _try_to_tell(self, pod: Pod) -> None:
        with contextlib.suppress(ClusterError):  # again in a moment
            self._tell(pod)

    def _tell(self, pod: Pod) -> None:
        """Ready as the contract has it: validated, and let through by the gate file."""
        if pod.play.ended(pod.seconds):
            annotations = {EXIT: str(pod.play.exit_code), MESSAGE: pod.play.termination().dumps()}
        elif pod.play.validated(pod.seconds) and self._let_through(pod):
            annotations = {READY: "true"}
        else:
            return
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        self.api.merge(path, {"metadata": {"annotations": annotations}})
        pod.published = True

    def _let_through(self, pod: Pod) -> bool:
        name = gate_name(pod.service, pod.revision)
        path = f"/api/v1/namespaces/{pod.namespace}/configmaps/{name}"
        found = self.api.get(path) or {}
        if not found.get("data"):
            return False
        gate = GateFile.parse(found["data"][GATE_FILE])
        return gate.open and pod.play.tokens >= gate.threshold()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects early is not logged."""


class _Handler(BaseHTTPRequestHandler):
    owner: Fake
    timeout = 10

    def do_GET(self) -> None:
        pod = self.owner.pods.get(self.connection.getsockname()[0])
        self.owner.asked += 1
        if pod is None or pod.play.name == "silent":
            self.close_connection = True
            return
        status, body = self._answer(pod)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, pod: Pod) -> tuple[int, bytes]:
        done = pod.play.validated(pod.seconds)
        path, _, query = self.path.partition("?")
        if path == SIZING_PATH:
            if pod.play.name == "garbage":
                return 200, b'{"version": 1, "state": "Happy"}'
            report = pod.play.report(pod.uid, pod.name, pod.revision, pod.seconds)
            return 200, report.dumps(served(query)).encode()
        if self.path == "/load" and done:
            return 200, dumps(pod.play.load()).encode()
        if self.path in ("/startupz", "/readyz", "/livez"):
            good = done or self.path == "/livez"
            return (200 if good else 503), json.dumps({"reason": "Ok" if good else "No"}).encode()
        return 503, b'{"reason":"NotValidated"}'

    def log_message(self, format: str, *args: object) -> None:
        """Thousands of them."""
