"""Alerts, metrics and traces. promtool runs each alert rule: it fires after its time and not
before, with a summary that names the service; promtool lints the metrics."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from collector import attributes, collecting
from playground import ROOT, Operator, serve, sizing_report
from waiting import answered, eventually, limit

from kvline_contract.report import State
from kvline_server.ipc.messages import Beat, EdgeBeat
from kvline_server.parent.metrics import render

pytestmark = pytest.mark.integration

FILE = ROOT / "monitoring" / "alerts.yaml"
SERVICE = {"namespace": "team", "service": "chat"}
POD = {"namespace": "team", "pod": "chat-1"}
CLAIM = {"namespace": "team", "release": "team-kvline"}
LINTED = 3  # promtool's exit code where it read the metrics, and names some
ALIAS = re.compile(r"vllm:\w+ metric names should not contain ':'")
HOUR = 60  # minutes without a cause
STEP = 2  # minutes between samples


@dataclass(frozen=True)
class Case:
    """Series that make an alert fire after `minutes`, and the labels that it then has."""

    alert: str
    series: dict[str, str]
    minutes: int
    labels: dict[str, str]
    value: str = ""  # the name in the summary


def condition(alert: str, kind: str, reason: str, minutes: int, value: int = 0) -> Case:
    labels = {**SERVICE, "type": kind, "reason": reason}
    return Case(alert, {series("kvline_service_condition", labels): str(value)}, minutes, labels)


def series(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}"


def ended(how: str) -> str:
    return series("kvline_requests_total", {**POD, "end": how})


CASES = [
    condition("KvlineServiceNotReady", "Ready", "Stressing", 15),
    condition("KvlineRevisionRejected", "UpToDate", "RevisionRejected", 1),
    condition("KvlineRevisionRejected", "UpToDate", "PromotionRefused", 1),
    condition("KvlineGateHeld", "UpToDate", "GateHeld", 15),
    condition("KvlineCapacityBelowMinimum", "CapacitySufficient", "BelowMinimum", 5),
    condition("KvlineCapacityDrifted", "CapacityStable", "Drifted", 5),
    condition("KvlineDemandUnknown", "ScalingActive", "DemandUnknown", 10),
    condition("KvlineAtMaximum", "ScalingActive", "AtMaximum", 15, 1),
    Case(
        "KvlineCacheFull",
        {
            series("kvline_kv_cache_usage_ratio", POD): "0.99",
            series("kvline_requests_waiting", POD): "3",
        },
        10,
        POD,
    ),
    Case("KvlineRequestsRefused", {series("kvline_rejected_sequences_total", POD): "0+7"}, 7, POD),
    Case("KvlineRequestsFailed", {ended("failed"): "0+7"}, 7, POD),
    Case(
        "KvlineImageOutdated",
        {series("kvline_service_image_outdated", SERVICE): "1"},
        7 * 24 * 60,
        SERVICE,
    ),
    Case("KvlineOperatorDown", {"kvline_operator_active": "0"}, 10, {}),
    Case("KvlineOperatorBehind", {"kvline_queue_overdue_seconds": "90"}, 5, {}, "1m 30s"),
    Case(
        "KvlineReconcilesFail",
        {series("kvline_reconciles_total", {"result": "ApiUnavailable"}): "0+4"},
        18,
        {"result": "ApiUnavailable"},
    ),
    Case(
        "KvlineNamespaceClaimDead", {series("kvline_namespace_claim_active", CLAIM): "0"}, 30, CLAIM
    ),
    Case("KvlineEarlierGroup", {"kvline_earlier_group_services": "3"}, 60, {}, "3"),
]
FINE = {
    "Ready": ("Serving", "1"),
    "UpToDate": ("RollingOut", "0"),
    "CapacitySufficient": ("Sufficient", "1"),
    "CapacityStable": ("NoRecord", "-1"),
    "ScalingActive": ("Stable", "1"),
}
QUIET = {
    **{
        series("kvline_service_condition", {**SERVICE, "type": kind, "reason": reason}): value
        for kind, (reason, value) in FINE.items()
    },
    series("kvline_service_condition", {"type": "Ready", "reason": "ScaledToZero"}): "0",
    series("kvline_kv_cache_usage_ratio", POD): "0.99",  # a full KV cache without waiting requests
    series("kvline_requests_waiting", POD): "0",
    ended("finished"): "0+7",
    ended("refused"): "0+7",  # 400s and the like, which no replica can help
    series("kvline_rejected_sequences_total", POD): "3",
    series("kvline_service_image_outdated", SERVICE): "0",
    "kvline_operator_active": "1",
    series("kvline_namespace_claim_active", CLAIM): "1",
    "kvline_earlier_group_services": "0",
    "kvline_queue_keys": "5",
    "kvline_queue_overdue_seconds": "2",
    series("kvline_reconciles_total", {"result": "ok"}): "0+9",
}


def rules() -> dict[str, Any]:
    groups = yaml.safe_load(FILE.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool(*words: str, input: str = "") -> subprocess.CompletedProcess[str]:
    import binaries

    command = [str(binaries.ensure("promtool", print)), *words]
    return subprocess.run(command, input=input, capture_output=True, text=True, check=False)


def unit_test(given: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    count = max(check["minutes"] for check in checks) // STEP + 2
    return {
        "interval": f"{STEP}m",
        "input_series": [
            {"series": name, "values": f"{value}x{count}" if "+" in value else f"{value}+0x{count}"}
            for name, value in given.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{c['minutes']}m", "alertname": c["alert"], "exp_alerts": c["expected"]}
            for c in checks
        ],
    }


def going_off(case: Case) -> dict[str, Any]:
    rule = rules()[case.alert]
    summary = re.sub(
        r"\{\{ \$(?:labels\.(\w+)|value(?: \| humanizeDuration)?) \}\}",
        lambda found: case.labels[found[1]] if found[1] else case.value,
        rule["annotations"]["summary"],
    )
    annotations = {**rule["annotations"], "summary": summary}
    return {"exp_labels": {**rule["labels"], **case.labels}, "exp_annotations": annotations}


def test_each_alert_goes_off_in_its_time_and_says_of_what(tmp_path: Path) -> None:
    assert list(dict.fromkeys(case.alert for case in CASES)) == list(rules())
    tests = []
    for case in CASES:
        early = {"alert": case.alert, "minutes": case.minutes - 1, "expected": []}
        late = {"alert": case.alert, "minutes": case.minutes + 2, "expected": [going_off(case)]}
        tests.append(unit_test(case.series, [early, late]))
    quiet = [{"alert": alert, "minutes": HOUR, "expected": []} for alert in rules()]
    tests.append(unit_test(QUIET, quiet))
    file = tmp_path / "alerts.test.yaml"
    body = {"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(body))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_have_nothing_to_be_linted() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(FILE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_scraped_has_nothing_to_be_linted(space: Any, operator: Any, node: Any) -> None:
    serve(space, node)
    url = f"http://127.0.0.1:{operator.probe_port}/metrics"
    with answered():
        metrics = eventually(lambda: urllib.request.urlopen(url, timeout=limit(5)).read().decode())
    assert 'service="chat"' in metrics
    report = sizing_report("u", State.VALIDATED)
    pod = render(report, Beat(False, 1), EdgeBeat(True, 0), 1, "m").decode()
    for text in (metrics, pod):
        done = promtool("check", "metrics", "--extended", input=text)
        # vLLM's own names have a colon, which Prometheus keeps for rules.
        wrong = [line for line in done.stderr.splitlines() if not ALIAS.fullmatch(line)]
        assert not wrong and done.returncode in (0, LINTED), done.stdout + done.stderr
    refused = promtool("check", "metrics", input="# TYPE kvline_things counter\nkvline_things 1\n")
    assert refused.returncode, "the linter is asked"


def test_reconciles_are_traced_where_a_collector_is_named(
    space: Any, node: Any, tmp_path: Path
) -> None:
    with collecting() as collector:
        operator = Operator(space, tmp_path / "operator.log", extra=collector.environment).start()
        try:
            serve(space, node)
            eventually(lambda: collector.spans)
        finally:
            operator.stop()
    span = collector.spans[0]
    where = {"k8s.namespace.name": space.name, "kvline.service": "chat", "kvline.result": "ok"}
    assert span.name == "reconcile" and attributes(span) == where
    assert collector.services == {"kvline-operator"}
