"""Metrics by vLLM's names have the values of ours."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvline_contract.report import SizingReport, State
from kvline_server.ipc.histogram import Latencies
from kvline_server.ipc.messages import Beat, EdgeBeat
from kvline_server.parent.metrics import render

OURS = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "output_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
}
HISTOGRAMS = [
    f"{name}_seconds_{end}"
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "request_queue_time",
        "e2e_request_latency",
    )
    for end in ("count", "sum")
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def samples(text: str) -> dict[str, tuple[float, dict[str, str]]]:
    families = text_string_to_metric_families(text)
    return {s.name: (s.value, s.labels) for family in families for s in family.samples}


def test_each_has_the_value_of_ours_and_stands_on_the_page() -> None:
    latencies = Latencies()
    for i, histogram in enumerate(
        (latencies.first_token, latencies.between_tokens, latencies.queue, latencies.whole), 1
    ):
        histogram.add(0.1 * i, i)
    beat = Beat(
        busy=True, steps=1, kv_tokens=2048, used_tokens=512, evictable_tokens=0,
        waiting_prompt_tokens=0, running=3, waiting=5, preemptions=7, prompt_tokens=11,
        output_tokens=13, draft_tokens=17, accepted_tokens=19,
    )  # fmt: skip
    edge = EdgeBeat(True, 0, latencies=latencies)
    report = SizingReport("u", "p", "r", 1, State.LOADING, "", "")
    found = samples(render(report, beat, edge, 1, "chat").decode())
    for theirs, ours in {**OURS, **{name: name for name in HISTOGRAMS}}.items():
        value, labels = found[f"vllm:{theirs}"]
        assert value == found[f"kvline_{ours}"][0] != 0
        assert labels == {"model_name": "chat", "engine": "0"}
    size = {"block_size": "16", "num_gpu_blocks": "128", "engine": "0"}
    assert found["vllm:cache_config_info"][1] == size
    named = set(re.findall(r"`(vllm:\w+)`", PAGE.read_text()))
    bare = {re.sub(r"_(count|sum|bucket|created)$", "", name) for name in found if ":" in name}
    assert named == bare
