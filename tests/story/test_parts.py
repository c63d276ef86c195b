"""What the GPU story's figures rest on, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpu_figures import APPLY_READY, FIGURES, STATUS_OF_BARE, Figures
from gpu_processes import age, find
from gpu_rollouts import undone
from gpu_shape import LLAMA8B, REHEARSAL
from gpu_traffic import Traffic


def test_bars_and_goals_go_the_way_of_the_unit() -> None:
    seconds, share = FIGURES[APPLY_READY], FIGURES[STATUS_OF_BARE]
    assert [seconds.verdict(v) for v in (9, 12, 12.1)] == ["goal", "bar", "missed"]
    assert [share.verdict(v) for v in (1.0, 0.995, 0.99)] == ["goal", "bar", "missed"]
    for figure in FIGURES.values():
        assert figure.verdict(figure.goal) == "goal"


def test_a_later_process_finds_what_an_earlier_one_kept(tmp_path: Path, capsys: Any) -> None:
    cluster: Any = type("OneGpu", (), {"gpus": 1})()
    state = tmp_path / "new" / "figures.json"
    Figures(cluster, state, tmp_path / "results.jsonl").keep(APPLY_READY, 11.5)
    again = Figures(cluster, state, tmp_path / "results.jsonl")
    again.keep("bare KV tokens", 993792)
    assert (again.kept(APPLY_READY), again.kept("nothing")) == (11.5, None)
    again.table()
    line = next(x for x in capsys.readouterr().out.splitlines() if "kubectl apply" in x)
    assert line.split()[-4:] == ["11.5", "12", "9", "bar"]


def test_the_bare_machine_gets_the_settings_of_the_spec() -> None:
    assert LLAMA8B.flags == ["--load", "random", "--max-model-len", "8192"]
    assert REHEARSAL.flags[-2:] == ["--memory", "1536Mi"]
    assert "--max-running-requests" in REHEARSAL.flags
    assert LLAMA8B.folder == "llama8b"


def test_a_change_is_taken_back_field_by_field() -> None:
    assert undone({"capacity": {"headroomMiB": 20480}}) == {"capacity": {"headroomMiB": None}}


class Server:
    """Answers completions but from `refuses` on, until `serves` again."""

    def __init__(self) -> None:
        self.refuses = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body = json.dumps({"usage": {"completion_tokens": 1}}).encode()
                self.send_response(503 if outer.refuses else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_gap_is_from_the_last_answer_to_the_next_one(server: Server) -> None:
    with Traffic(server.url, "m") as traffic:
        time.sleep(0.4)
        server.refuses = True
        time.sleep(1.0)
        server.refuses = False
        time.sleep(0.5)
    assert 0.9 < traffic.gap() < 1.6
    assert traffic.answered and "503" in traffic.failed[0][1]


def test_no_answer_at_all_is_no_gap_of_zero(server: Server) -> None:
    server.refuses = True
    with Traffic(server.url, "m") as traffic:
        time.sleep(0.3)
    assert traffic.gap() == float("inf")


def test_a_process_is_found_by_its_cgroup_and_has_an_age() -> None:
    group = Path("/proc/self/cgroup").read_text().strip().splitlines()[0]
    words = "time.sleep(59.125)"
    with subprocess.Popen([sys.executable, "-c", f"import time; {words}"]) as process:
        try:
            time.sleep(0.3)
            assert find(group, words) == process.pid
            assert 0.2 < age(process.pid) < 20
        finally:
            process.kill()
