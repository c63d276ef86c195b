"""The operator's HTTP port for /healthz and /metrics, served by its own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from kvline_contract.listening import HTTPServer
from kvline_operator.report.metrics import Metrics

log = logging.getLogger("kvline")


class ProbeServer(HTTPServer):
    def __init__(self, port: int, unhealthy: Callable[[], str | None], metrics: Metrics) -> None:
        self.unhealthy = unhealthy
        self.metrics = metrics
        self._was_well = True
        super().__init__("", port, _Handler)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, daemon=True, name="probe").start()

    def reason(self) -> str | None:
        """Why it is not healthy. Logged as it begins: the kubelet ends the container without it."""
        reason = self.unhealthy()
        if reason is not None and self._was_well:
            log.error("not healthy, which ends this operator if it lasts: %s", reason)
        self._was_well = reason is None
        return reason


class _Handler(BaseHTTPRequestHandler):
    server: ProbeServer
    timeout = 10

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.server.metrics.text())
        elif self.path == "/healthz":
            reason = self.server.reason()
            self._send(200 if reason is None else 500, (reason or "ok").encode())
        else:
            self._send(404, b"not found")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not logged."""
