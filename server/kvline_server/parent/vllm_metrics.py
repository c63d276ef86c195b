"""Metrics that vLLM has too, by its names: endpoint pickers, dashboards and load tools read them.

Only those that mean the same. Its `request_success` counts by reason, and its prefix cache's hits
have no like here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvline_server.ipc.histogram import Latencies
from kvline_server.ipc.messages import Beat
from kvline_server.memory.pages import PAGE_SIZE

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM counts engines of one server
# By name: the field of Latencies, and what it measures of a sequence.
LATENCIES = {
    "time_to_first_token": ("first_token", "From its request to its first token"),
    "inter_token_latency": ("between_tokens", "From an output token to the next"),
    "request_queue_time": ("queue", "In the queue, before its first step"),
    "e2e_request_latency": ("whole", "From its request to its last token"),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens",
    "generation_tokens": "Tokens generated",
    "num_preemptions": "Sequences preempted for lack of KV blocks",
    "spec_decode_num_draft_tokens": "Draft tokens",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
}


def usage(beat: Beat) -> float:
    """The larger of the shares of KV tokens and of slots of recurrent states that are in use."""
    tokens = beat.used_tokens / beat.kv_tokens if beat.kv_tokens else 0.0
    return max(tokens, beat.running / beat.state_slots if beat.state_slots else 0.0)


def collect(beat: Beat, latencies: Latencies, model: str) -> Iterator[Metric]:
    labels = (model, ENGINE)
    share = usage(beat)
    for name, text, value in (
        ("num_requests_running", "Sequences in the running batch", beat.running),
        ("num_requests_waiting", "Sequences waiting for their first step", beat.waiting),
        ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", share),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    counts = [beat.prompt_tokens, beat.output_tokens, beat.preemptions]
    counts += [beat.draft_tokens, beat.accepted_tokens]
    for (name, text), count in zip(COUNTERS.items(), counts, strict=True):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        counter.add_metric(labels, count)
        yield counter
    for name, (field, text) in LATENCIES.items():
        counted = getattr(latencies, field)
        histogram = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=LABELS)
        histogram.add_metric(labels, counted.buckets(), counted.seconds)
        yield histogram
    yield _cache(beat.kv_tokens // PAGE_SIZE)


def _cache(blocks: int) -> Metric:
    """Pickers take the sizes from labels."""
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache", labels=("block_size", "num_gpu_blocks", "engine")
    )
    info.add_metric((str(PAGE_SIZE), str(blocks), ENGINE), 1)
    return info
