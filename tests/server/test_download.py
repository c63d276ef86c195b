"""The download step against a small local server that speaks the hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    LaunchConfig,
    LoadFormat,
    Model,
)

pytestmark = pytest.mark.process

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_canary_5a7d"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"never fetched",
    "modeling_evil.py": b"raise SystemExit",
    "tokenizer.json": b"{}",
}


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.cut = ""  # a file whose transfer breaks off
        self.gated = False
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        if self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        path = self.path.partition("?")[0]
        if path == f"/api/models/org/tiny/revision/{COMMIT}":
            siblings = [{"rfilename": n, "size": len(d)} for n, d in FILES.items()]
            about = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(about).encode())
            return
        if path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha256(d).hexdigest()}
                for n, d in FILES.items()
            ]
            self.reply(200, json.dumps(tree).encode())
            return
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if name not in FILES:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        data = FILES[name]
        etag = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if body and name == self.server.cut:
            self.reply(200, data[: len(data) // 2], {**etag, "Content-Length": str(len(data))})
            self.close_connection = True
            return
        self.reply(200, data, etag, body)

    def reply(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(
        load: LoadFormat = LoadFormat.WEIGHTS, token: str = "", commit: str = COMMIT
    ) -> subprocess.CompletedProcess[str]:
        model = Model(f"hf://org/tiny@{commit}", str(tmp_path / "cache" / commit), "tiny", load)
        launch = LaunchConfig(
            1, "ns", "svc", "rev", "image", Device.CPU, 1, model, EngineOptions(), CapacityOptions()
        )
        config = tmp_path / "launch.json"
        config.write_text(launch.dumps())
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HOME": str(tmp_path)}
        environment["HF_HUB_ETAG_TIMEOUT"] = environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "5"
        if token:
            environment["HF_TOKEN"] = token
        command = [sys.executable, "-m", "kvline_server", "download", "--config", str(config)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_only_data_files_come_and_only_whole(
    hub: Hub, fetch: Callable[..., Any], tmp_path: Path
) -> None:
    done = fetch()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / COMMIT
    got = {p.name for p in folder.iterdir()}
    assert got == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.seen.clear()
    again = fetch()
    assert again.returncode == 0
    assert hub.seen == []


def test_random_load_fetches_no_weights(fetch: Callable[..., Any], tmp_path: Path) -> None:
    assert fetch(LoadFormat.RANDOM).returncode == 0
    got = {p.name for p in (tmp_path / "cache" / COMMIT).iterdir()}
    assert got == {"config.json", "tokenizer.json"}


def test_a_broken_transfer_leaves_no_model(
    hub: Hub, fetch: Callable[..., Any], tmp_path: Path
) -> None:
    """F60: a half file is never taken for a whole one, and the next try succeeds."""
    hub.cut = "model.safetensors"
    broken = fetch()
    assert broken.returncode == 33, broken.stderr
    assert not (tmp_path / "cache" / COMMIT).exists()
    hub.cut = ""
    assert fetch().returncode == 0
    whole = tmp_path / "cache" / COMMIT / "model.safetensors"
    assert whole.read_bytes() == FILES["model.safetensors"]


def test_the_token_opens_a_gated_model_and_is_never_shown(
    hub: Hub, fetch: Callable[..., Any]
) -> None:
    hub.gated = True
    without = fetch()
    assert without.returncode == 30
    assert "tokenSecret" in without.stderr
    wrong = fetch(token="hf_wrong_canary")
    assert wrong.returncode == 30
    right = fetch(token=TOKEN)
    assert right.returncode == 0, right.stderr
    for done in (without, wrong, right):
        assert TOKEN not in done.stdout + done.stderr
        assert "hf_wrong_canary" not in done.stdout + done.stderr


def test_an_unknown_commit_is_not_found(fetch: Callable[..., Any]) -> None:
    done = fetch(commit="f" * 40)
    assert done.returncode == 30
    assert "f" * 40 in done.stderr
