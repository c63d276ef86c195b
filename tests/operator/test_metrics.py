"""Metrics follow a service's status and Prometheus' conventions; alerts and dashboard use only
existing ones."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent))

from pictures import of_two_ranks

from kvline_contract.codec import encode
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.report import Result, SizingReport, Source, State
from kvline_operator.api.key import Key
from kvline_operator.kube import Kube
from kvline_operator.observe.claims import Claim, Claims
from kvline_operator.observe.earlier_group import EarlierGroup
from kvline_operator.report.metrics import Metrics
from kvline_operator.report.status_cache import StatusCache, View
from kvline_operator.run.workqueue import WorkQueue
from kvline_server.ipc.messages import Beat, EdgeBeat
from kvline_server.parent.metrics import render

ROOT = Path(__file__).resolve().parents[2]
MEMORY = MemoryV1.of(Memory(22, (Part("weights", 5), Part("kv-cache", 15), Part("experts", 2))))
STATUS: dict[str, Any] = {
    "replicas": 3,
    "readyReplicas": 2,
    "desiredReplicas": 4,
    "capacity": {
        "kvTokens": 100,
        "kvTokensTotal": 230,
        "spread": {"min": 100, "max": 130},
        "fullLengthSequences": 3,
        "sequences": 16,
        "attempts": 2,
        "memory": encode(MEMORY),
    },
    "rollout": {
        "stableRevision": "aaaaa",
        "rejectedRevision": "bbbbb",
        "imageOutdated": True,
        "gate": {"measured": 50, "required": 95, "baseline": 100, "sequences": {"measured": 8}},
    },
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving"},
        {"type": "CapacityStable", "status": "Unknown", "reason": "NoRecord"},
    ],
}
UNITS = ("tokens", "bytes", "seconds", "ratio", "info")
COUNTED = (  # gauges that count things, whose unit is the thing
    "keys|replicas|requests_waiting|requests_running|kv_blocks|sequences|attempts"
    "|condition|image_outdated|active|budget_serving|services"
)


class Claimed(Claims):
    """A namespace that another release has."""

    def known(self) -> dict[str, Claim]:
        return {"team": Claim("theirs", lives=True)}


def operator(*more: View) -> str:
    board = StatusCache()
    for view in more:
        board.put(view)
    board.put(View(Key("team", "chat"), {"replicas": 1}, STATUS))
    board.put(View(Key("team", "new"), {"replicas": 2}, {}))
    times = itertools.chain((10.0, 10.0, 10.0), itertools.repeat(11.5))
    kube, queue = Kube(client.ApiClient()), WorkQueue(times.__next__)
    kube.writes = 7
    queue.add(Key("team", "chat"))
    queue.add(Key("team", "new"))
    earlier = EarlierGroup(kube, ())
    earlier.services = 3
    metrics = Metrics(board, kube, queue, earlier, Claimed(kube, "kvline-system"))
    metrics.reconciled("ok", 0.1)
    metrics.worked(0.02)
    return metrics.text().decode()


def server() -> str:
    memory = MemoryV1(100, 20, 10, 0, 50, 10, 10).upgraded()
    result = Result(4096, 512, Source.MEASURED, "f", 90, 6000, 0, "t", (memory,))
    report = SizingReport("u", "p", "r", 1, State.VALIDATED, "t", "t", result=result)
    return render(report, Beat(False, 1), EdgeBeat(True, 0), 1, "m").decode()


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (s.name, ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_service_s_figures_are_those_of_its_status() -> None:
    found = samples(operator())
    where = "namespace=team,service=chat"

    def value(name: str, label: str = "") -> float:
        labels = ",".join(sorted([*where.split(","), *([label] if label else [])]))
        return found[f"kvline_service_{name}", labels]

    assert value("budget_tokens", "figure=min") == 100
    assert value("budget_tokens", "figure=sum") == 230
    assert value("memory_bytes", "part=kv-cache") == 15 << 20
    assert value("memory_bytes", "part=experts") == 2 << 20
    assert value("memory_bytes", "part=total") == 22 << 20
    assert value("replicas", "state=wanted") == 4  # desiredReplicas, not spec.replicas
    assert value("gate_tokens", "figure=required") == 95
    assert value("gate_sequences", "figure=measured") == 8
    assert (value("full_length_sequences"), value("sequences")) == (3, 16)
    assert value("image_outdated") == 1
    assert value("validation_attempts") == 2
    assert found["kvline_service_condition", f"{where.replace(',', ',reason=Serving,')},type=Ready"]
    assert (
        found[
            "kvline_service_condition",
            "namespace=team,reason=NoRecord,service=chat,type=CapacityStable",
        ]
        == -1
    )
    assert found["kvline_service_replicas", "namespace=team,service=new,state=wanted"] == 2
    assert found["kvline_reconcile_cpu_seconds_sum", ""] == 0.02
    assert found["kvline_api_writes_total", ""] == 7
    assert found["kvline_queue_keys", ""] == 2
    assert found["kvline_queue_overdue_seconds", ""] == 1.5
    assert found["kvline_queue_stalled_seconds", ""] == 1.5
    assert found["kvline_earlier_group_services", ""] == 3


def test_the_memory_of_ranks_is_exported_where_there_are_several() -> None:
    view = of_two_ranks()
    found = samples(operator(view))
    where = "namespace=team,part={},rank={},service=smollm2"
    name = "kvline_service_rank_memory_bytes"
    assert found[name, where.format("others", 0)] == 48 << 20
    assert found[name, where.format("others", 1)] == 308 << 20
    assert not [labels for family, labels in found if family == name and "=chat" in labels]


@pytest.mark.parametrize("serving", [True, False])
def test_the_last_figure_stays_while_nothing_serves(serving: bool) -> None:
    board = StatusCache()
    capacity = {**STATUS["capacity"], "serving": serving, "kvTokensTotal": 230 * serving}
    board.put(View(Key("team", "chat"), {}, {**STATUS, "capacity": capacity}))
    found = samples(Metrics(board, Kube(client.ApiClient()), WorkQueue()).text().decode())
    labels = "namespace=team,service=chat"
    assert found["kvline_service_budget_tokens", f"figure=min,{labels}"] == 100
    assert found["kvline_service_budget_serving", labels] == serving


def test_a_service_that_is_gone_is_not_reported() -> None:
    board = StatusCache()
    metrics = Metrics(board, Kube(client.ApiClient()), WorkQueue())
    board.put(View(Key("team", "chat"), {}, STATUS))
    assert 'service="chat"' in metrics.text().decode()
    board.drop(Key("team", "chat"))
    assert 'service="chat"' not in metrics.text().decode()


@pytest.mark.parametrize("text", [operator(of_two_ranks()), server()], ids=["operator", "server"])
def test_names_follow_the_conventions(text: str) -> None:
    """promtool's rules, and ours: a unit in every gauge's name."""
    for family in text_string_to_metric_families(text):
        name = family.name
        if name.endswith("_created"):
            continue  # the client library's own
        if name.startswith("vllm:"):
            continue  # as vLLM has it, which the server's own tests compare
        assert re.fullmatch(r"kvline_[a-z][a-z0-9_]*", name)
        assert family.documentation and family.documentation != name
        assert family.type != "unknown"
        if family.type == "counter":
            assert all(s.name == f"{name}_total" or "_created" in s.name for s in family.samples)
        else:
            assert not name.endswith("_total")
        if family.type == "gauge":
            assert name.endswith(UNITS) or re.search(COUNTED, name), name
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of monitoring/, with its place."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in json.loads((ROOT / "monitoring" / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    recipe = yaml.safe_load((ROOT / "monitoring" / "recipes" / "keda.yaml").read_text())
    for trigger in recipe["spec"]["triggers"]:
        yield "keda.yaml", trigger["metadata"]["query"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "monitoring" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_and_dashboard_name_metrics_and_labels_that_exist() -> None:
    labels: dict[str, set[str]] = {}
    for text in (operator(of_two_ranks()), server()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    scraped = {"namespace", "pod", "kvline_dev_service"}  # labels added by the scrape
    for where, expression in expressions():
        names = re.findall(r"\bkvline_[a-z0-9_]+(?=[{\[\s)]|$)", expression)
        assert names, where
        for name in names:
            assert name in labels, (where, name)
        for name, selector in re.findall(r"(kvline_[a-z0-9_]+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)(?:=|!=|=~)\"", selector))
            assert used <= labels[name] | scraped, (where, name)


def test_each_alert_has_a_paragraph_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for rule in alerts():
        assert rule["annotations"]["runbook_url"].endswith("#" + rule["alert"].lower())
        assert f"\n### {rule['alert']}\n" in page, rule["alert"]


def test_an_alert_for_several_reasons_says_which_and_its_paragraph_has_each() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for rule in alerts():
        paragraph = page.partition(f"\n### {rule['alert']}\n")[2].partition("\n### ")[0]
        for reasons in re.findall(r'reason=~"([^"]+)"', rule["expr"]):
            assert "{{ $labels.reason }}" in rule["annotations"]["summary"], rule["alert"]
            assert [r for r in reasons.split("|") if r not in paragraph] == [], rule["alert"]
