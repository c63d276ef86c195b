"""Prometheus metrics of a replica, from the heartbeats of its processes.

Those that the Gateway API Inference Extension's model-server protocol requires come first; its
endpoint picker is configured with their names. Names contain units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvline_contract.report import Result, SizingReport
from kvline_server.ipc.messages import Beat, EdgeBeat
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.parent import vllm_metrics

MIB = 1 << 20


def render(report: SizingReport, beat: Beat, edge: EdgeBeat, starts: int, model: str) -> bytes:
    """The metrics in Prometheus' text format."""
    return generate_latest(_Snapshot(report, beat, edge, starts, model))


@dataclass(frozen=True, slots=True)
class _Snapshot(Collector):
    report: SizingReport
    beat: Beat
    edge: EdgeBeat
    starts: int
    model: str

    def collect(self) -> Iterator[Metric]:
        b = self.beat
        share = vllm_metrics.usage(b)
        yield _gauge("requests_waiting", "Sequences waiting for their first step", b.waiting)
        yield _gauge("requests_running", "Sequences in the running batch", b.running)
        yield _gauge(
            "kv_cache_usage_ratio", "Share of the KV budget or of slots in use, 0 to 1", share
        )
        yield _gauge("kv_block_size_tokens", "Tokens per KV page", PAGE_SIZE)
        yield _gauge("kv_blocks", "KV pages in the budget", b.kv_tokens // PAGE_SIZE)
        yield _gauge("kv_used_tokens", "Tokens held by running sequences", b.used_tokens)
        yield _gauge(
            "kv_evictable_tokens", "Tokens cached for prefixes, not in use", b.evictable_tokens
        )
        yield _counter("prompt_tokens", "Prompt tokens received", b.prompt_tokens)
        yield _counter("output_tokens", "Tokens generated", b.output_tokens)
        yield _counter("preemptions", "Sequences preempted for lack of KV pages", b.preemptions)
        yield _counter(
            "spec_decode_num_draft_tokens", "Draft tokens of speculation", b.draft_tokens
        )
        yield _counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted", b.accepted_tokens
        )
        yield _counter(
            "failed_grammars",
            "Sequences that ended because their grammar could not be followed",
            b.failed_grammars,
        )
        if b.state_slots:
            yield from _states(b)
        yield _counter("engine_steps", "Steps run since the start", b.steps)
        yield _counter("engine_starts", "Starts of the engine process", self.starts)
        yield self._requests()
        yield _counter(
            "rejected_sequences",
            "Sequences answered 429; one for a request whose prompts are not known yet",
            self.edge.rejected,
        )
        yield from self._latencies()
        yield from vllm_metrics.collect(b, self.edge.latencies, self.model)
        if self.report.result is not None:
            yield from _sizes(self.report.result)

    def _latencies(self) -> Iterator[Metric]:
        for name, (field, text) in vllm_metrics.LATENCIES.items():
            family = HistogramMetricFamily(f"kvline_{name}_seconds", text, labels=["model_name"])
            counted = getattr(self.edge.latencies, field)
            family.add_metric([self.model], counted.buckets(), counted.seconds)
            yield family

    def _requests(self) -> Metric:
        family = CounterMetricFamily("kvline_requests", "Requests by outcome", labels=["end"])
        for end in ("finished", "refused", "aborted", "failed"):
            family.add_metric([end], getattr(self.edge, end))
        return family


def _states(beat: Beat) -> Iterator[Metric]:
    """Of a model with recurrent layers."""
    yield _gauge("state_slots", "Sequences whose recurrent states fit at once", beat.state_slots)
    yield _gauge("state_snapshots", "Recurrent states kept for prefixes", beat.snapshots)
    yield _counter(
        "prefix_hit_tokens",
        "Tokens that a recurrent state has saved, at each admission",
        beat.prefix_tokens,
    )
    yield _counter(
        "prefix_lost_tokens",
        "Tokens computed again, at an admission, as their keys were cached and no state was",
        beat.stateless_tokens,
    )


def _sizes(result: Result) -> Iterator[Metric]:
    yield _gauge("kv_budget_tokens", "Validated KV budget", result.kv_tokens)
    memory = GaugeMetricFamily(
        "kvline_memory_bytes", "Memory of each GPU by part", labels=["rank", "part"]
    )
    for number, rank in enumerate(result.ranks):
        for part in rank.parts:
            memory.add_metric([str(number), part.name], part.mib * MIB)
    yield memory
    yield _gauge("profile_loop_seconds", "Time from load to Validated", result.loop_ms / 1000)
    yield _gauge(
        "start_saved_seconds",
        "Start time saved by a record, against a search",
        result.saved_ms / 1000,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvline_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvline_{name}", text, value=value)
