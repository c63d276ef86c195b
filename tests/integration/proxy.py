"""A proxy between the operator and the real API server, with faults to be switched on."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from waiting import eventually

ACCOUNT = "kvline-system-kvline-operator.kubeconfig"  # of the operator
LAST = "/networkpolicies?limit="  # a list of the last kind of a resync
GONE = {"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "code": 410}}
Answer = tuple[int, dict[str, str]]


class Proxy(ThreadingHTTPServer):
    """Takes plain HTTP and forwards it by TLS to the API server, with the client's own token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        given = yaml.safe_load(kubeconfig.read_text())
        cluster = given["clusters"][0]["cluster"]
        self.behind = urlsplit(cluster["server"])
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.tls = ssl.create_default_context(cadata=authority)
        cluster["server"] = f"http://127.0.0.1:{self.server_port}"
        del cluster["certificate-authority-data"]
        self.kubeconfig = folder / "through-the-proxy.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(given))
        self.writes: list[str] = []  # requested paths, in order
        self.reads: list[str] = []  # likewise, without watches
        self.resyncs = 0  # lists of LAST that were answered; a watch begins with one too
        self.swallowed: list[dict[str, Any]] = []  # events that no watch received
        self.swallow: Callable[[dict[str, Any]], bool] = lambda event: False
        self.answer: Callable[[str, str], Answer | None] = lambda method, path: None
        self.delay = 0.0  # seconds before each call but a watch
        self.apart = False  # no connection gets through
        self.gone = 0  # watches that are still to be ended with 410
        self.opened = self.ended = 0  # watches, the latter with 410
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def await_resync(self) -> None:
        """Returns once a resync that began after this call has ended: of two that end one after
        another, the second."""
        before = self.resyncs
        eventually(lambda: self.resyncs >= before + 2, 60)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are intended here and not reported."""


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        watch = "watch=true" in self.path
        if self.command != "GET":
            self.server.writes.append(f"{self.command} {self.path}")
        elif not watch:
            self.server.reads.append(self.path)
        if self.server.apart:
            self._hang_up()
            return
        answer = self.server.answer(self.command, self.path)
        if answer is not None:
            status, headers = answer
            self._send(status, headers, json.dumps({"kind": "Status", "code": status}).encode())
            return
        if not watch:
            time.sleep(self.server.delay)
        self._pass_on(body, watch)
        self.server.resyncs += LAST in self.path and not watch

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def _pass_on(self, body: bytes, watch: bool) -> None:
        to = self.server.behind
        behind = http.client.HTTPSConnection(
            str(to.hostname), to.port or 443, context=self.server.tls, timeout=None if watch else 60
        )
        left = ("host", "connection", "accept-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left}
        try:
            behind.request(self.command, self.path, body or None, headers)
            got = behind.getresponse()
            kind = {"Content-Type": got.getheader("Content-Type") or "application/json"}
            if watch and got.status == 200:
                self._stream(got, kind)
            else:
                self._send(got.status, kind, got.read())
        finally:
            behind.close()

    def _stream(self, got: http.client.HTTPResponse, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        self.server.opened += 1
        while line := got.readline():
            event = json.loads(line)
            if self.server.apart:
                self._hang_up()
                return
            if self.server.gone:
                self.server.gone -= 1
                self.server.ended += 1
                self.wfile.write(json.dumps(GONE).encode() + b"\n")
                return
            if self.server.swallow(event):
                self.server.swallowed.append(event)
                continue
            self.wfile.write(line)
            self.wfile.flush()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        return
