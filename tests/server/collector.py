"""An OpenTelemetry collector: takes traces over OTLP/HTTP and keeps their spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to send here, and soon."""
        where = f"http://127.0.0.1:{self.server_port}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_BSP_SCHEDULE_DELAY": "100"}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        given = ExportTraceServiceRequest.FromString(body)
        for resource in given.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.server.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def collecting() -> Iterator[Collector]:
    made = Collector()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.int_value or a.value.string_value for a in span.attributes}
