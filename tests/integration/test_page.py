"""The page in a real browser: the operator's own, then one that changes while it is open."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playground import ROOT, Operator, serve
from servers import free_port
from waiting import eventually, limit

sys.path.insert(0, str(ROOT / "tests" / "operator"))

from pictures import rolled_back, simple

from kvline_operator.page.app import serve as serve_page
from kvline_operator.report.status_cache import StatusCache, View

pytestmark = pytest.mark.integration

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Headless Chromium: the page as it stands after its scripts ran for `seconds`."""
    import tools

    tools.ensure_packages(print, {"chromium": "chromium"})
    folder = tmp_path_factory.mktemp("browser")

    def fetch(url: str, *words: str, seconds: float = 1) -> str:
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={folder}", "--enable-logging=stderr", "--hide-scrollbars"]
        command += [f"--virtual-time-budget={int(seconds * 1000)}", *(words or ["--dump-dom"])]
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=limit(90))
        assert "CONSOLE" not in done.stderr, done.stderr[-2000:]  # no error, no refused script
        return done.stdout

    return fetch


@pytest.fixture
def operator(space: Any, tmp_path: Path) -> Iterator[Operator]:
    made = Operator(space, tmp_path / "operator.log", {"KVLINE_POD_IP": "127.0.0.1"})
    made.page_port = free_port()
    yield made.start()
    made.stop()


def test_the_operator_s_page_has_what_the_status_has(
    space: Any, operator: Any, node: Any, browse: Callable[..., str], tmp_path: Path
) -> None:
    serve(space, node)
    home = f"http://127.0.0.1:{operator.page_port}"
    revision = space.get("kvl", "chat")["status"]["rollout"]["stableRevision"]
    eventually(lambda: f"revision {revision}" in browse(home))
    text = browse(f"{home}/services/{space.name}/chat")
    assert "4,096" in text and "Serving" in text and "UpToDate" in text
    for name, words in (
        ("light", ["--window-size=1200,1500"]),
        ("phone", ["--window-size=400,1500"]),
    ):
        file = tmp_path / f"{name}.png"
        browse(f"{home}/services/{space.name}/chat", *words, f"--screenshot={file}")
        # An empty page, or one without its style sheet, is a far smaller file.
        assert file.read_bytes().startswith(PNG) and file.stat().st_size > 30_000
    space.kubectl("delete", "kvl", "chat")
    eventually(lambda: "No service yet" in browse(home))


def test_the_page_s_service_leads_to_the_lease_s_holder_by_every_replica(
    space: Any, operator: Operator, node: Any, tmp_path: Path
) -> None:
    serve(space, node)
    standby = Operator(space, tmp_path / "standby.log", operator.extra)
    standby.page_port = free_port()
    standby.start()

    def shown() -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{standby.page_port}/", timeout=limit(10))
        except httpx.TransportError:
            return False
        return f"{space.name}/chat" in answer.text

    try:
        eventually(lambda: "standing by: " in standby.log.read_text())
        assert standby.is_well() and shown()
        operator.stop()
        eventually(lambda: "holds the lease and reconciles" in standby.log.read_text())
        eventually(shown)
    finally:
        standby.stop()
        operator.start()


def test_an_open_page_follows_what_happens(browse: Callable[..., str]) -> None:
    class Changing(StatusCache):
        reads = 0

        def all(self) -> list[View]:
            self.reads += 1
            return [simple("first", "False", "Probing") if self.reads == 1 else rolled_back()]

    shown, port = Changing(), free_port()
    serve_page(shown, port)
    eventually(lambda: _answers(port))
    text = browse(f"http://127.0.0.1:{port}", seconds=5)
    assert "Probing" not in text and "19,376" in text
    assert shown.reads >= 2


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
