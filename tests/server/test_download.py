"""The download step against a small local server that speaks the hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub
from servers import CONFIG, launch_config
from waiting import limit

from kvline_contract.launch import LoadFormat

pytestmark = pytest.mark.process

TOKEN = "hf_canary_5a7d"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"never fetched",
    "modeling_evil.py": b"raise SystemExit",
    "original/config.json": b"never fetched",
    "original/model.safetensors": b"never fetched, as gpt-oss' repositories have it",
    "tokenizer.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub(FILES, TOKEN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(
        load: LoadFormat = LoadFormat.WEIGHTS,
        token: str | None = None,
        commit: str = COMMIT,
        step: str = "download",
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cache" / commit
        launch = launch_config(folder, source=f"hf://org/tiny@{commit}", load=load)
        config = tmp_path / "launch.json"
        config.write_text(launch.dumps())
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HOME": str(tmp_path)}
        environment["HF_HUB_ETAG_TIMEOUT"] = environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "5"
        if token is not None:
            environment["HF_TOKEN"] = token
        command = [sys.executable, "-m", "kvline_server", step, "--config", str(config)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit(60), check=False
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
    assert "tokenSecretRef" in without.stderr
    wrong = fetch(token="hf_wrong_canary")
    assert wrong.returncode == 30
    right = fetch(token=TOKEN)
    assert right.returncode == 0, right.stderr
    for done in (without, wrong, right):
        assert TOKEN not in done.stdout + done.stderr
        assert "hf_wrong_canary" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "token", ["", " \n", "two words", "two\nlines", "schl\u00fcssel", "k" * 4097]
)
def test_an_invalid_token_is_rejected_without_being_shown(
    fetch: Callable[..., Any], token: str
) -> None:
    """C12."""
    done = fetch(token=token)
    assert done.returncode == 22
    assert "spec.model.tokenSecretRef" in done.stderr and "Traceback" not in done.stderr
    assert not token.strip() or token not in done.stderr


def test_a_token_may_end_with_the_newline_of_its_file(hub: Hub, fetch: Callable[..., Any]) -> None:
    """C12."""
    hub.gated = True
    assert fetch(token=TOKEN + "\n").returncode == 0


def test_an_unknown_commit_is_not_found(fetch: Callable[..., Any]) -> None:
    done = fetch(commit="f" * 40)
    assert done.returncode == 30
    assert "f" * 40 in done.stderr
    assert "no right to read it" in done.stderr and "spec.model.tokenSecretRef" in done.stderr


def test_the_check_asks_the_hub_without_fetching_weights(
    hub: Hub, fetch: Callable[..., Any], tmp_path: Path
) -> None:
    """A4: before Recreate and Replace take replicas away, as a download would end in a new pod."""
    hub.files["config.json"] = json.dumps(CONFIG).encode()
    done = fetch(step="check")
    assert done.returncode == 0, done.stderr
    assert not any("safetensors" in path for path, _ in hub.seen)
    assert not (tmp_path / "cache").exists()

    hub.gated = True
    refused = fetch(step="check")
    assert refused.returncode == 30 and "tokenSecretRef" in refused.stderr
    assert fetch(step="check", token=TOKEN).returncode == 0
    hub.gated = False
    assert fetch(step="check", commit="f" * 40).returncode == 30

    weights = hub.files.pop("model.safetensors")
    without = fetch(step="check")
    assert without.returncode == 31 and "no .safetensors file" in without.stderr
    assert fetch(LoadFormat.RANDOM, step="check").returncode == 0
    hub.files |= {"model.safetensors": weights, "config.json": b'{"architectures": ["Other"]}'}
    other = fetch(step="check")
    assert other.returncode == 32 and "Other" in other.stderr
    assert "org/tiny@" in other.stderr and "/tmp" not in other.stderr


def test_the_check_fetches_quantisation_that_is_in_a_file_of_its_own(
    hub: Hub, fetch: Callable[..., Any]
) -> None:
    """Else it would answer for a model that no new pod starts."""
    quantised = json.dumps({"quantization": {"quant_algo": "FP8"}}).encode()
    hub.files = FILES | {
        "config.json": json.dumps(CONFIG).encode(),
        "hf_quant_config.json": quantised,
    }
    hub.etags |= {"hf_quant_config.json": hashlib.sha256(quantised).hexdigest()}
    done = fetch(LoadFormat.RANDOM, step="check")
    assert done.returncode == 32
    assert "hf_quant_config.json: quantization.quant_algo 'FP8'" in done.stderr
