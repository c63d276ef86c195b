"""Objects rendered from values: what must be the same, and what must not."""

from __future__ import annotations

from kvline_operator.render import Owner, event, network_policy
from kvline_operator.settings import Settings
from kvline_operator.spec import parse

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


def test_who_may_reach_the_internal_port() -> None:
    """The operator's namespace, and those whose Prometheus was let in."""
    spec = parse(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
            "spec": {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}},
        }
    )
    settings = Settings("image", own_namespace="ours", metrics_namespaces=("monitoring",))
    rules = network_policy(OWNER, spec, settings)["spec"]["ingress"]
    (internal,) = [rule for rule in rules if rule["ports"][0]["port"] == 8001]
    labels = [source["namespaceSelector"]["matchLabels"] for source in internal["from"]]
    assert [label["kubernetes.io/metadata.name"] for label in labels] == ["ours", "monitoring"]
