"""`kubectl kvline explain` has what the status has."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from kvline_kubectl.show import explain, services

STATUS: dict[str, Any] = {
    "conditions": [{"type": "Ready", "status": "False", "reason": "Starting", "message": "m"}],
    "capacity": {"kvTokens": 16416, "serving": False, "asOf": "2026-11-21T10:00:00Z"},
    "diagnosis": {
        "revision": "fhcrv",
        "binding": "KVCache",
        "largestMaxModelLen": 976,
        "knobs": [
            {"field": "spec.engine.maxRunningRequests", "direction": "lower", "withNext": True},
            {"field": "spec.engine.prefixSnapshots", "direction": "lower", "value": 4},
            {"field": "spec.resources.memory", "direction": "Raise", "value": "3Gi"},
        ],
    },
    "warnings": ["chat-1: no prebuilt kernels for this GPU and model, using torch's slower ones"],
}


def test_warnings_of_replicas_and_the_last_figure_are_explained() -> None:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(explain({"metadata": {"name": "chat"}, "status": STATUS}, []))
    text = printed.get()
    assert "Warning: chat-1: no prebuilt kernels" in text
    assert "No replica serves; the last one had 16,416 KV tokens" in text
    assert "binding constraint: KVCache" in text
    assert "largest spec.engine.maxModelLen that fits: 976" in text
    assert "would help: Raise spec.resources.memory to 3Gi" in text
    assert "would help: lower spec.engine.maxRunningRequests\n" in text.replace(" \n", "\n")
    assert "and with it: lower spec.engine.prefixSnapshots to 4" in text


def test_what_would_help_is_shown_before_it_is_asked() -> None:
    rows = [
        {
            "field": "spec.resources.memory",
            "value": "3072Mi",
            "kvTokens": 39700,
            "bound": "AtLeast",
        },
        {"field": "spec.engine.kvCacheDtype", "value": "fp8", "kvTokens": 32832},
    ]
    capacity = {**STATUS["capacity"], "tokensPerGiB": 23301, "estimates": rows}
    console = Console(width=80)
    with console.capture() as printed:
        console.print(
            explain({"metadata": {"name": "chat"}, "status": {**STATUS, "capacity": capacity}}, [])
        )
    text = printed.get()
    assert "23,301 KV tokens in a GiB of KV cache" in text
    assert any(
        line.split() == ["resources.memory", "3072Mi", "at", "least", "39,700", "2.42x"]
        for line in text.splitlines()
    )
    assert any(
        line.split() == ["engine.kvCacheDtype", "fp8", "about", "32,832", "2.00x"]
        for line in text.splitlines()
    )
    assert "arithmetic from the measured parts, not measured" in text
    missing = {"type": "ModelAvailable", "status": "False", "reason": "NotFound", "message": "m"}
    status = {**STATUS, "conditions": [*STATUS["conditions"], missing], "capacity": capacity}
    with console.capture() as printed:
        console.print(explain({"metadata": {"name": "chat"}, "status": status}, []))
    assert "ModelAvailable: NotFound" in (text := printed.get())
    assert "KV tokens in a GiB" not in text and "kvCacheDtype" not in text


def test_no_name_or_figure_of_a_list_is_broken_on_a_narrow_terminal() -> None:
    name = "smollm2-instruct-for-production"
    body = {
        "metadata": {"name": name, "namespace": "research-and-development"},
        "spec": {"replicas": 2},
        "status": {
            "reason": "RevisionRejected",
            "capacity": {"kvTokens": 19376, "kvTokensTotal": 38752, "fullLengthSequences": 2},
            "rollout": {"stableRevision": "9xqtt", "gate": {"result": "Rejected"}},
        },
    }
    console = Console(width=80, soft_wrap=True)
    with console.capture() as printed:
        console.print(services([body], True))
    heading, line = printed.get().splitlines()
    for word in ("research-and-development", name, "RevisionRejected", "19,376", "Rejected"):
        assert word in line.split()
    assert "KV TOKENS" in heading


@pytest.mark.parametrize(
    ("reason", "do"),
    [("AtMaximum", "raise it"), ("ForeignChange", "remove spec.autoscaling")],
)
def test_a_condition_that_is_met_and_asks_for_something_is_explained(reason: str, do: str) -> None:
    """ScalingActive is True: the operator scales."""
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "m"}
    scales = {"type": "ScalingActive", "status": "True", "reason": reason, "message": "its words"}
    console = Console(width=200)
    with console.capture() as printed:
        found = {"conditions": [ready, scales]}
        console.print(explain({"metadata": {"name": "chat"}, "status": found}, []))
    text = printed.get()
    assert text.startswith("chat serves.")
    assert f"ScalingActive: {reason}" in text and "now:  its words" in text and do in text
    assert "All conditions are met" not in text
    usual = {**scales, "reason": "Stable"}
    with console.capture() as printed:
        found = {"conditions": [ready, usual]}
        console.print(explain({"metadata": {"name": "chat"}, "status": found}, []))
    assert "All conditions are met" in (text := printed.get()) and "ScalingActive" not in text
