"""Traces of requests, at a real collector: what belongs to whom, and that times add up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector import Collector, attributes, collecting
from servers import Server, serving
from waiting import eventually, limit

from kvline_contract import tracing

pytestmark = pytest.mark.process

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "prompt": [5, 6, 7, 8, 9], "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Collector]]:
    scratch = tmp_path_factory.mktemp("traced")
    with (
        collecting() as collector,
        serving(Server(tiny_model, scratch, faults=collector.environment)) as server,
    ):
        yield server, collector


@pytest.fixture
def traced(pair: tuple[Server, Collector]) -> Server:
    return pair[0]


@pytest.fixture
def collector(pair: tuple[Server, Collector]) -> Collector:
    """Without the spans of other tests, of which each has waited for all of its own."""
    pair[1].spans.clear()
    return pair[1]


def spans(collector: Collector, count: int) -> list[Any]:
    def all_of_them() -> list[Any]:
        return list(collector.spans) if len(collector.spans) >= count else []

    return list(eventually(all_of_them, 20, on="server"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_part_of_its_client_s_trace(
    traced: Server, collector: Collector, stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    url = f"{traced.url}/v1/completions"
    answer = httpx.post(url, json={**BODY, "stream": stream}, headers=headers, timeout=limit(30))
    assert answer.status_code == 200
    found = {span.name: span for span in spans(collector, 5)}
    assert set(found) == {"POST /v1/completions", "sequence", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in found.values()} == {TRACE}
    assert collector.services == {"kvline-server"}

    request, sequence = found["POST /v1/completions"], found["sequence"]
    assert request.parent_span_id.hex() == PARENT
    assert sequence.parent_span_id == request.span_id
    parts = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == sequence.span_id for part in parts)
    # One after the other, from the sequence's first moment to its last.
    edges = [(part.start_time_unix_nano, part.end_time_unix_nano) for part in parts]
    assert edges[0][0] == sequence.start_time_unix_nano
    assert edges[0][1] == edges[1][0] and edges[1][1] == edges[2][0]
    assert edges[2][1] == sequence.end_time_unix_nano <= request.end_time_unix_nano
    assert attributes(found["prefill"])["gen_ai.usage.input_tokens"] == 5
    assert attributes(found["decode"])["gen_ai.usage.output_tokens"] == 8


def test_a_refusal_is_an_error_and_without_a_parent_a_trace_of_its_own(
    traced: Server, collector: Collector
) -> None:
    answer = httpx.post(
        f"{traced.url}/v1/completions", json={**BODY, "model": "other"}, timeout=limit(5)
    )
    assert answer.status_code == 404
    (span,) = spans(collector, 1)
    assert (span.status.code, span.status.message) == (2, "NotFound")
    assert not span.parent_span_id


def test_a_collector_that_is_not_there_slows_nothing_down(start: Callable[..., Server]) -> None:
    """F48: a collector of traces that is not there delays neither answers nor the end."""
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    server = start(faults=nobody)
    server.wait()
    url = f"{server.url}/v1/completions"
    assert all(httpx.post(url, json=BODY, timeout=limit(30)).status_code == 200 for _ in range(5))
    server.process.terminate()
    assert server.end() == 0


def test_without_an_address_there_is_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing.tracer("x") is None


def test_a_missing_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.ENDPOINT, "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(tracing.NoTracing, match=r"kvline\[otel\]"):
        tracing.tracer("x")
