"""Objects rendered from values: what must be the same, and what must not."""

from __future__ import annotations

import pytest

from kvline_operator.podspec import pod_template
from kvline_operator.render import Owner, event, network_policy
from kvline_operator.revisions import Revision
from kvline_operator.settings import Settings
from kvline_operator.spec import ServiceSpec, parse

OWNER = Owner("ns", "chat", "uid", "chat")
SAID = ("CapacityValidated", "Normal", "4096 KV tokens")


def name(said: tuple[str, str, str], version: str, time: str) -> str:
    return str(event(OWNER, said, version, time)["metadata"]["name"])


def test_an_event_repeated_after_a_crash_has_the_same_name() -> None:
    """F01: the status was not written, so the version is the same, whatever the clock says."""
    first = name(SAID, "7", "2026-11-21T10:00:00Z")
    assert name(SAID, "7", "2026-11-21T10:00:09Z") == first
    assert name(SAID, "8", "2026-11-21T10:00:00Z") != first
    assert name(("Serving", "Normal", "x"), "7", "2026-11-21T10:00:00Z") != first


def spec(source: str = "pvc://models/tiny") -> ServiceSpec:
    return parse(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
            "spec": {"model": {"source": source}, "resources": {"memory": "2Gi"}},
        }
    )


def let_in(settings: Settings, port: int) -> list[str]:
    """Names of namespaces; empty for the service's own."""
    rules = network_policy(OWNER, spec(), settings)["spec"]["ingress"]
    (rule,) = [rule for rule in rules if rule["ports"][0]["port"] == port]
    labels = [s.get("namespaceSelector", {}).get("matchLabels", {}) for s in rule["from"]]
    return [label.get("kubernetes.io/metadata.name", "") for label in labels]


def test_who_may_reach_which_port() -> None:
    """The operator's namespace and those whose Prometheus was let in; clients the other one."""
    settings = Settings(
        "image",
        own_namespace="ours",
        metrics_namespaces=("monitoring",),
        client_namespaces=("apps",),
    )
    assert let_in(settings, 8001) == ["ours", "monitoring"]
    assert let_in(settings, 8000) == ["", "apps"]


@pytest.mark.parametrize(
    ("source", "traces", "ports"),
    [
        ("pvc://models/tiny", "", []),
        ("hf://a/b@" + "0" * 40, "", [443]),
        ("pvc://models/tiny", "http://collector:4318", [4318]),
        ("hf://a/b@" + "0" * 40, "http://collector", [443, 80]),
    ],
)
def test_a_pod_may_reach_what_it_needs_and_nothing_else(
    source: str, traces: str, ports: list[int]
) -> None:
    settings = Settings("image", traces_endpoint=traces)
    egress = network_policy(OWNER, spec(source), settings)["spec"]["egress"]
    assert [p["port"] for rule in egress for p in rule["ports"] if p["port"] != 53] == ports
    assert bool(egress) == bool(ports)


def test_what_the_platform_wants_is_in_the_pods() -> None:
    settings = Settings(
        "image",
        traces_endpoint="http://collector:4318",
        runtime_class="nvidia",
        priority_class="serving",
        pull_secrets=("registry",),
    )
    plain, wanted = (
        pod_template("chat", spec(), Revision("aaaaa", "image", "{}", 1), s)["spec"]
        for s in (Settings("image"), settings)
    )
    assert wanted["runtimeClassName"] == "nvidia" and wanted["priorityClassName"] == "serving"
    assert wanted["imagePullSecrets"] == [{"name": "registry"}]
    where = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}
    assert where in wanted["containers"][0]["env"]
    assert not {"runtimeClassName", "priorityClassName", "imagePullSecrets"} & set(plain)
