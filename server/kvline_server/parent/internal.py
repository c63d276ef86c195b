"""The internal port: probes, sizing report, load and metrics, from the first second.

Served by threads of the parent, so neither a long tokenisation nor a long step can fail a probe.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler

from kvline_contract import names
from kvline_contract.codec import ContractError, dumps
from kvline_contract.listening import HTTPServer
from kvline_contract.report import served
from kvline_server.parent.health import Health


class InternalServer(HTTPServer):
    def __init__(self, host: str, port: int, health: Health) -> None:
        self.health = health
        super().__init__(host, port, _Handler)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, daemon=True, name="internal").start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects early is not logged."""


class _Handler(BaseHTTPRequestHandler):
    server: InternalServer
    server_version = "kvline"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        health = self.server.health
        path, _, query = self.path.partition("?")
        if path == "/startupz":
            self._probe(health.not_started())
        elif path == "/readyz":
            self._probe(health.not_ready())
        elif path == "/livez":
            self._probe(health.not_alive())
        elif path == names.PRE_STOP_PATH:
            health.wait_to_leave()  # the kubelet sends SIGTERM after the answer
            self._probe(None)
        elif path == names.SIZING_PATH:
            self._report(query)
        elif path == "/load":
            load = health.load()
            if load is None:
                self._probe("NotValidated")
            else:
                self._send(200, dumps(load).encode())
        elif path == "/metrics":
            self._send(200, health.metrics(), "text/plain; version=0.0.4")
        else:
            self._send(404, b'{"reason":"NoSuchRoute"}')

    def do_POST(self) -> None:
        health = self.server.health
        path, _, query = self.path.partition("?")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path == names.END_PRE_STOP_PATH:
            self._probe(health.end_wait(token))
        elif path == names.OPEN_GATE_PATH:
            self._probe(health.open_gate(query.removeprefix("uid="), token))
        else:
            self._send(404, b'{"reason":"NoSuchRoute"}')

    def _report(self, query: str) -> None:
        try:
            version = served(query)
        except ContractError as error:
            self._send(400, json.dumps({"reason": str(error)}).encode())
        else:
            self._send(200, self.server.health.keeper.report.dumps(version).encode())

    def _probe(self, reason: str | None) -> None:
        status = 200 if reason is None else 503
        self._send(status, json.dumps({"reason": reason or "Ok"}).encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not logged."""
