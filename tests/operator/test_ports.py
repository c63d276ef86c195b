"""The operator's own ports, and those of pods that it asks, in both families of addresses."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import httpx
import pytest
from kubernetes import client
from waiting import eventually, limit

sys.path.insert(0, str(Path(__file__).parent))

from pictures import board

from kvline_contract.report import SizingReport, State
from kvline_operator.kube import Kube
from kvline_operator.observe.reports import Reports
from kvline_operator.page import app as page
from kvline_operator.report.metrics import Metrics
from kvline_operator.run.probe import ProbeServer
from kvline_operator.run.workqueue import WorkQueue
from kvline_server.options.options import Options
from kvline_server.parent.health import Health
from kvline_server.parent.internal import InternalServer
from kvline_server.parent.report_keeper import ReportKeeper

EVERY = ("127.0.0.1", "[::1]")


def free_port() -> int:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", EVERY)
def test_probes_and_metrics_answer_both_families(host: str) -> None:
    metrics = Metrics(board(), Kube(client.ApiClient()), WorkQueue())
    server = ProbeServer(0, lambda: None, metrics)
    server.start()
    try:
        url = f"http://{host}:{server.server_port}"
        assert httpx.get(f"{url}/healthz", timeout=limit(30)).text == "ok"
        assert "kvline_" in httpx.get(f"{url}/metrics", timeout=limit(30)).text
    finally:
        server.shutdown()
        server.server_close()


def test_why_the_operator_is_not_healthy_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet ended it without a word in its log."""
    metrics = Metrics(board(), Kube(client.ApiClient()), WorkQueue())
    reasons: list[str | None] = [None, "a watch is dead", "a watch is dead", None, "again"]
    answers = iter(reasons)
    server = ProbeServer(0, lambda: next(answers), metrics)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/healthz"
        got = [httpx.get(url, timeout=limit(30)).text for _ in reasons]
    finally:
        server.shutdown()
        server.server_close()
    assert got == [reason or "ok" for reason in reasons]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [text.rpartition(": ")[2] for text in logged] == ["a watch is dead", "again"]


def test_the_page_answers_both_families_and_a_taken_port_is_an_error() -> None:
    port = free_port()
    page.serve(board(), port)

    def shown() -> bool:
        answers = [httpx.get(f"http://{host}:{port}/", timeout=limit(30)) for host in EVERY]
        return all("smollm2" in answer.text for answer in answers)

    eventually(shown, 30, on="server")
    with pytest.raises(OSError, match="in use"):
        page.serve(board(), port)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_pod_s_report_is_read_at_an_address_of_either_family(
    address: str, tmp_path: Path
) -> None:
    keeper = ReportKeeper("uid", "pod", "abcde")
    health = Health(Options(tmp_path / "launch.json", tmp_path), keeper, "m", 1)
    server = InternalServer(Options(tmp_path, tmp_path).host, 0, health)
    server.start()
    try:
        reading = Reports(server.server_port, 1.0).read("uid", address, ready=False)
        assert isinstance(reading.report, SizingReport), reading.error
        assert reading.report.state is not State.VALIDATED
    finally:
        server.shutdown()
        server.server_close()
    nobody = Reports(9, 1.0).read("uid", address, ready=False)
    assert f"{'[::1]' if ':' in address else address}:" in nobody.error
