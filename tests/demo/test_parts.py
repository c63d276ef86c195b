"""What the GPU story's figures rest on, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gpu_story
import install
import pytest
from errors import ClusterError
from gpu_figures import APPLY_READY, FIGURES, STATUS_OF_BARE, Figures
from gpu_processes import age, find, gpu_of
from gpu_rollouts import undone
from gpu_run import Run
from gpu_shape import LLAMA8B, REHEARSAL
from gpu_traffic import Traffic
from waiting import eventually, limit


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


def wait_until(holds: Callable[[], object]) -> None:
    eventually(holds, on="server", every=0.01)


def test_a_gap_is_from_the_last_answer_to_the_next_one() -> None:
    traffic = Traffic("http://127.0.0.1:1", "m")
    traffic.answered = [5.0, 5.25, 7.75, 8.0]
    traffic.failed = [(6.0, "503"), (7.0, "503")]
    assert traffic.gap() == 2.5


def test_a_rejection_is_no_answer(server: Server) -> None:
    with Traffic(server.url, "m") as traffic:
        wait_until(lambda: len(traffic.answered) > 1)
        server.refuses = True
        wait_until(lambda: any("503" in wrong for _, wrong in traffic.failed))
        answered = len(traffic.answered)
        wait_until(lambda: len([wrong for _, wrong in traffic.failed if "503" in wrong]) > 2)
        assert len(traffic.answered) == answered
        server.refuses = False
        wait_until(lambda: len(traffic.answered) > answered)


def test_no_answer_at_all_is_no_gap_of_zero(server: Server) -> None:
    server.refuses = True
    with Traffic(server.url, "m") as traffic:
        wait_until(lambda: traffic.failed)
    assert traffic.gap() == float("inf")


def test_a_process_is_found_by_its_cgroup_and_has_an_age() -> None:
    group = Path("/proc/self/cgroup").read_text().strip().splitlines()[0]
    words = "time.sleep(59.125)"

    def found() -> int | None:
        """The kernel closes a new program's files before it shows the words of its command."""
        with suppress(ClusterError):
            return find(group, words)
        return None

    with subprocess.Popen([sys.executable, "-c", f"import time; {words}"]) as process:
        try:
            assert eventually(found) == process.pid
            eventually(lambda: age(process.pid) > 0.2)
            assert age(process.pid) < limit(20)
        finally:
            process.kill()


def test_the_gpu_of_a_process_is_the_one_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '71, GPU-a'; echo '72, GPU-b'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_of(72) == "GPU-b"
    with pytest.raises(ClusterError, match="GPU-a"):
        gpu_of(7)


def test_the_manifest_gets_the_images_or_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {"operator": "o:1", "server": "s:1", "operator-next": "o:2", "cuda": "c:1"}
    text = install.manifest(images)
    assert all(word in text for word in ("image: o:1", '"s:1"', '"c:1"'))
    assert ":dev" not in text and "--page-port=0" not in text
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "install.yaml").write_text(text)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    with pytest.raises(ClusterError, match="kvline-operator:dev"):
        install.manifest(images)


def test_a_cluster_that_is_not_there_hides_no_error_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Run) -> None:
        raise ClusterError("of the step")

    def lacks(*words: str) -> None:
        raise FileNotFoundError("kubectl")

    names = {"gpus": 0, "check": lambda self, say: None, "kubectl": staticmethod(lacks)}
    cluster: Any = type("Nothing", (), names)()
    figures = Figures(cluster, tmp_path / "figures.json", tmp_path / "results.jsonl")
    monkeypatch.setitem(gpu_story.STEPS, "model", ("a step", fails))
    with pytest.raises(ClusterError, match="of the step"):
        gpu_story.play(Run(cluster, REHEARSAL, figures, tmp_path), ["model"])
