"""The package as README.md installs it, in an environment of its own: kvline-server sizes, compares
and serves with what pip takes from the index, not with what a lock names.

pip's part is uv's here, with its cache, and releases count until the day of the lock; `make lock`
runs this file with all that there are today.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tools
from packaging.markers import Marker
from packaging.requirements import Requirement
from waiting import limit

ROOT = Path(__file__).resolve().parents[2]
EXTRA = "server"
LOCK = "dev"  # with which the other tests run
# What is not in uv's cache yet is downloaded: gigabytes, where torch is another.
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def until() -> tuple[str, ...]:
    """uv's flag for the day of the lock; none where today's releases are tried."""
    if os.environ.get("KVLINE_INSTALL_TODAY"):
        return ()
    dates = (ROOT / "requirements" / "dates.txt").read_text()
    return ("--exclude-newer", dict(line.split() for line in dates.splitlines())[LOCK])


def pinned(requirements: str) -> dict[str, str]:
    """The versions of a lock that hold on this machine, by name."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.+?))?(?: \\)?$", requirements, re.M)
    return {name: v for name, v, marker in found if not marker or Marker(marker).evaluate()}


def untested() -> dict[str, str]:
    """What a resolver takes for the extra's own requirements where the lock has another version."""
    command = ("pip", "compile", "pyproject.toml", "--extra", EXTRA, "--quiet", "--no-annotate")
    taken = pinned(tools.run_uv(*command, "--no-header", "--python", sys.executable, *until()))
    locked = pinned((ROOT / "requirements" / f"{LOCK}.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [Requirement(text).name for text in project["optional-dependencies"][EXTRA]]
    return {name: taken[name] for name in names if taken[name] != locked[name]}


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The folder of the installed programs. It is beside .venv, to which uv links from its cache
    too, without a copy."""
    if until():
        assert untested() == {}, f"pip takes versions with which no test runs: {LOCK}.txt"
    folder = ROOT / "build" / "installed"
    tools.run_uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    try:
        fresh = ("--python", str(folder / "bin" / "python"))
        tools.run_uv("pip", "install", "--quiet", *fresh, *until(), f".[{EXTRA}]")
        yield folder / "bin"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def only_a_config(tiny_model: Path, tmp_path: Path) -> Path:
    """All that a size with random weights needs."""
    (tmp_path / "model").mkdir()
    return Path(shutil.copy(tiny_model / "config.json", tmp_path / "model")).parent


def of_a_user() -> dict[str, str]:
    """The environment without what would lead to this tree or to .venv."""
    ours = ("PYTHON", "VIRTUAL_ENV", "KVLINE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def size(programs: Path, model: Path, *words: str) -> str:
    """What it prints for a person."""
    command: list[str | Path] = [programs / "kvline-server", "size", "--model", model]
    command += ["--load", "random", "--device", "cpu", "--memory", "900Mi", *words]
    done = subprocess.run(
        command,
        cwd=model,
        env=of_a_user(),
        capture_output=True,
        text=True,
        timeout=limit(100),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_a_size_with_random_weights(programs: Path, only_a_config: Path) -> None:
    assert re.search(r"\d+ KV tokens .*validated", size(programs, only_a_config), re.S)


def test_a_comparison(programs: Path, only_a_config: Path) -> None:
    table = size(programs, only_a_config, "--compare", "kvCacheDtype=fp8")
    assert re.search(r"as given +[\d,]+ +1\.00", table), table
    assert re.search(r"kvCacheDtype=fp8 +[\d,]+ +\d\.\d\d", table), table


def test_an_answer(programs: Path, tiny_model: Path) -> None:
    """From weights in safetensors, with a tokenizer and a chat template."""
    command: list[str | Path] = [programs / "kvline-server", "serve", "--model", tiny_model]
    command += ["--served-name", "tiny", "--device", "cpu", "--memory", "900Mi"]
    command += ["--host", "127.0.0.1", "--port", "0", "--internal-port", "0"]
    with subprocess.Popen(
        command, cwd=tiny_model, env=of_a_user(), stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if "ready:" in line:
                    break
            api = re.search(r"API on (127\.0\.0\.1:\d+)", "".join(lines))
            assert api, "".join(lines)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            url = f"http://{api[1]}/v1/chat/completions"
            answer = httpx.post(url, json=body | {"max_tokens": 4}, timeout=limit(60))
            assert answer.status_code == 200, answer.text
            assert 1 <= json.loads(answer.text)["usage"]["completion_tokens"] <= 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(60)) == 0, server.stderr.read()
        finally:
            server.kill()
