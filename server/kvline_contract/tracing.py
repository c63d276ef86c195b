"""OpenTelemetry traces of operator and server, where the environment names a collector.

Off without OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT); the other OTEL_ variables work as
specified. Needs the `otel` extra, which the images have.
Source: opentelemetry.io/docs/specs/otel/protocol/exporter.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENDPOINTS = (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SECONDS = 2  # time limit of one export, so that a slow collector delays no later batch


class NoTracing(Exception):
    """Tracing is configured, but its packages are not installed."""


def tracer(service: str) -> Any | None:
    """A tracer that exports on a thread of its own and drops what the collector does not accept;
    None where tracing is off. Raises NoTracing where the extra is missing."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise NoTracing(
            f"{ENDPOINT} is set, and this installation lacks the extra: kvline[otel]"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=SECONDS)))
    atexit.register(provider.force_flush, 1000 * SECONDS)
    return provider.get_tracer("kvline")
