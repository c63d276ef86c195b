"""Spans of a request, and for each of its sequences the time in the queue, in prefill, in decode.

Attribute names follow OpenTelemetry's conventions for generative AI. With a `traceparent` header
(W3C Trace Context) the request is part of the client's trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvline_server.ipc.messages import Delta


class Traces:
    """The process's tracer; does nothing without one."""

    def __init__(self, tracer: Any | None) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[None]:
        """The span of a request. Spans started in its task are its children; the task ends with
        the request, so the context is never detached."""
        if self._tracer is None:
            yield
            return
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = TraceContextTextMapPropagator().extract(headers)
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(name, context=given, kind=kind)
        context.attach(trace.set_span_in_context(span, given))
        try:
            yield
        except BaseException as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def sequence(self, prompt_tokens: int) -> SequenceTrace | None:
        return SequenceTrace(self._tracer, prompt_tokens) if self._tracer is not None else None


class SequenceTrace:
    """One sequence's times, in nanoseconds since 1970; emitted as spans when it ends."""

    def __init__(self, tracer: Any, prompt_tokens: int) -> None:
        self._tracer = tracer
        self._prompt_tokens = prompt_tokens
        self._began = self._now = time.time_ns()
        self._first = 0
        self._admitted = 0
        self._tokens = 0
        self._cached = 0
        self._finish = "aborted"

    def receive(self, deltas: list[Delta]) -> None:
        self._now = time.time_ns()
        if not self._first:
            self._first = self._now
            waited = 1_000_000 * deltas[0].waited_ms
            self._admitted = min(self._began + waited, self._now)
        self._tokens += sum(len(delta.tokens) for delta in deltas)
        self._cached = deltas[-1].cached
        self._finish = deltas[-1].finish or self._finish

    def end(self) -> None:
        """Emits the spans. A sequence without a token counts as queued all the time."""
        from opentelemetry import trace

        if not self._first:
            self._admitted = self._now = time.time_ns()
        given = {"gen_ai.usage.input_tokens": self._prompt_tokens}
        generated = {"gen_ai.usage.output_tokens": self._tokens}
        finish = {"gen_ai.response.finish_reasons": [self._finish]}
        whole = self._tracer.start_span(
            "sequence", start_time=self._began, attributes={**given, **generated, **finish}
        )
        inside = trace.set_span_in_context(whole)
        self._span("queue", inside, self._began, self._admitted, {})
        if self._first:
            cached = {"gen_ai.usage.cache_read.input_tokens": self._cached}
            self._span("prefill", inside, self._admitted, self._first, {**given, **cached})
            self._span("decode", inside, self._first, self._now, generated)
        whole.end(self._now)

    def _span(self, name: str, inside: Any, start: int, end: int, about: dict[str, int]) -> None:
        made = self._tracer.start_span(name, context=inside, start_time=start, attributes=about)
        made.end(end)
