"""The command line by hand: a mistake is one line with its code, and a run leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import launch_config
from waiting import eventually, limit

from kvline_server.command.scratch import LOCK, PREFIX, scratch
from kvline_server.formats.detect import NoFormat
from kvline_server.http.tls import WHAT
from kvline_server.options.flags import quantity, with_flag_names

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True, "stream": True}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "kvline_server", *map(str, words)]


def mistake(*words: object, **options: Any) -> tuple[int, str]:
    """The code and the one line."""
    ended = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=limit(100), **options
    )
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("kvline-server: ")
    return ended.returncode, lines[0]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--model", "M", "--port", "99999"], 2, "--port: expected 0 to 65535"),
        (["--model", "M", "--port", "x"], 2, "--port"),
        (["--model", "M", "--internal-port", "-1"], 2, "--internal-port"),
        (["--model", "M", "--threads", "-1"], 2, "--threads: expected 1 to"),
        (["--model", "M", "--threads", "0"], 2, "--threads"),
        (["--model", "M", "--drain-seconds", "3601"], 2, "--drain-seconds: expected 1 to 3600"),
        (["--model", "M", "--memory", "lots"], 2, "--memory: expected a quantity"),
        (["--model", "M", "--memory", "800"], 2, "--memory: 800 is 800 bytes: 800Mi?"),
        (["--model", "M", "--device", "cpu", "--host", "192.0.2.1"], 20, "--host 192.0.2.1 is no"),
        (["--model", "M", "--no-such-flag"], 2, "--no-such-flag"),
        (["--model", "M", "--gpus", "9"], 2, "--gpus: expected 1 to 8"),
        (["--config", "F", "--gpus", "2"], 20, "--config F takes no --gpus"),
        (["--model", "M", "--max-model-len", "1"], 20, "--max-model-len: expected 16 to"),
        (["--model", "M", "--kv-cache-dtype", "fp4"], 2, "'fp4' (choose from"),
        (["--model", "M", "--state-dtype", "fp8"], 2, "'fp8' (choose from"),
        (["--config", "F", "--state-dtype", "bfloat16"], 20, "takes no --state-dtype"),
        (["--model", "M", "--images", "always"], 2, "'always' (choose from"),
        (["--model", "M", "--max-image-patches", "3"], 20, "--max-image-patches: expected 4 to"),
        (["--config", "F", "--images", "Required"], 20, "takes no --images"),
        (["--model", "M", "--tool-call-parser", "hermes"], 2, "'hermes' (choose from"),
        (["--config", "F", "--tool-call-parser", "Hermes"], 20, "takes no --tool-call-parser"),
        (["--model", "M", "--headroom-mib", "-1"], 20, "--headroom-mib: expected"),
        ([], 20, "--model DIR and --config FILE"),
        (["--config", "/tmp"], 20, "/tmp: Is a directory"),
        (["--config", "/nowhere/launch.json"], 20, "No such file"),
        (["--config", "F", "--kv-tokens", "2048"], 20, "--config F takes no --kv-tokens"),
        (["--config", "F", "--load", "random"], 20, "--config F takes no --load"),
        (
            ["--config", "F", "--served-name", "x", "--device", "cpu", "--max-model-len", "64"],
            20,
            "--config F takes no --served-name, --device, --max-model-len",
        ),
        (["--model", "M", "--state-dir", "/proc/x"], 20, "--state-dir /proc/x: "),
        (["--model", "M", "--state-dir", "/dev/null/x"], 20, "Not a directory"),
        (["--model", "M", "--state-dir", "/tmp/" + "x" * 300], 20, "File name too long"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_its_code(words: list[str], code: int, named: str) -> None:
    ended, line = mistake("serve", *words)
    assert ended == code
    assert named in line


@pytest.mark.parametrize("flag", ["api-key-file", "tls-dir"])
def test_a_key_or_tls_that_the_file_leaves_off_is_refused(tmp_path: Path, flag: str) -> None:
    """Or somebody who names a key would serve everybody without one."""
    config = tmp_path / "launch.json"
    config.write_text(launch_config(tmp_path).dumps())
    code, line = mistake("serve", "--config", config, f"--{flag}", tmp_path)
    assert code == 20
    assert f"--config {config} takes no --{flag}" in line


def test_a_record_that_cannot_be_written_is_reported_before_the_work(tmp_path: Path) -> None:
    code, line = mistake("size", "--model", "M", "--write-record", tmp_path / "none" / "file")
    assert code == 20
    assert "--write-record" in line


def test_the_version_is_shown() -> None:
    shown = subprocess.run(command("--version"), capture_output=True, text=True, check=True).stdout
    assert shown.startswith("kvline-server 0.")


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        (
            "spec.engine.maxModelLen is 513, the model's own limit is 512",
            "--max-model-len is 513, the model's own limit is 512",
        ),
        ("engine.maxModelLen: expected 16", "--max-model-len: expected 16"),
        ("kvTokens pins 2048 tokens", "--kv-tokens pins 2048 tokens"),
        ("raise spec.resources.memory by 3 MiB", "raise --memory by 3 MiB"),
        ("/m/model.safetensors: memory of a model", "/m/model.safetensors: memory of a model"),
        (
            "spec.access.apiKeySecretRef names a Secret of this namespace and a key in it",
            "--api-key-file sets it",
        ),
        (
            f"/d: no tls.crt and tls.key; {WHAT}",
            "/d: no tls.crt and tls.key; --tls-dir names the folder",
        ),
        (
            "spec.resources.gpus asks for a GPU, and CUDA finds none on this machine",
            "--device cuda asks for a GPU, and CUDA finds none on this machine",
        ),
        (
            "engine.speculation.maxDraftTokens: expected 1 to 7, got 8",
            "--max-draft-tokens: expected 1 to 7, got 8",
        ),
        ("engine.defaultMaxTokens: expected 1", "--default-max-tokens: expected 1"),
        (
            NoFormat.UNKNOWN,
            NoFormat.UNKNOWN.replace("spec.engine.toolCallParser", "--tool-call-parser"),
        ),
        (
            "no .safetensors file; spec.model.loadFormat: random needs none",
            "no .safetensors file; --load random needs none",
        ),
    ],
)
def test_messages_name_flags(spec: str, flags: str) -> None:
    assert with_flag_names(spec) == flags


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2Gi", 2 << 30),
        ("1e9", 10**9),
        ("1.5Gi", 3 << 29),
        (".5G", 5 * 10**8),
        ("1Ti", 1 << 40),
        ("1E", 10**18),
        ("12e+8", 12 * 10**8),
        ("2097152", 2 << 20),
    ],
)
def test_memory_is_read_as_kubernetes_reads_it(text: str, size: int) -> None:
    assert quantity(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1 Gi", "2gi", "1e99", "1e", "1m", ".", "0.5Ki"])
def test_a_bad_quantity_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        quantity(text)


def test_a_killed_run_leaves_nothing_for_longer_than_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose owner lives stays, one whose owner is gone goes, a stranger's is let be."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, fresh, other = (tmp_path / name for name in (f"{PREFIX}a", f"{PREFIX}b", "kvline-x"))
    for folder in (dead, fresh, other):
        folder.mkdir()
    for folder in (dead, other):
        (folder / LOCK).touch()
    with scratch() as mine:
        assert not dead.exists()
        assert fresh.exists() and other.exists()
        with scratch() as second:
            assert mine.exists() and second.exists()
    assert sorted(tmp_path.iterdir()) == [fresh, other]


# With a model -----------------------------------------------------------------------------------

Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Serve]:
    """`kvline-server serve` in a process group of its own, as a shell starts it."""
    made: list[subprocess.Popen[str]] = []
    (tmp_path / "tmp").mkdir()

    def begin(*words: object, model: Path = tiny_model) -> subprocess.Popen[str]:
        all_words = ["serve", "--model", model, "--served-name", "tiny", "--host", "127.0.0.1"]
        all_words += ["--device", "cpu", "--max-model-len", 256, "--max-running-requests", 4]
        all_words += ["--kv-tokens", 2048, "--headroom-mib", 8, "--memory", "900Mi"]
        all_words += ["--threads", 1, *words]
        made.append(
            subprocess.Popen(
                command(*all_words),
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
                env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            )
        )
        return made[-1]

    yield begin
    for process in made:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def ends_with(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The code and the one line beside those of the stages."""
    _, text = process.communicate(timeout=limit(100))
    (line,) = [line for line in text.strip().splitlines() if not is_stage(line)]
    return process.returncode, line


def is_stage(line: str) -> bool:
    return re.match(r"kvline-server: stage \d of \d: ", line) is not None


def ready_line(process: subprocess.Popen[str]) -> str:
    """The first line that is of no stage."""
    assert process.stderr is not None
    return next(line for line in process.stderr if not is_stage(line))


@pytest.mark.process
def test_ctrl_c_drains_and_a_second_one_ends_at_once(serve: Serve, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group: the engine works on until the stream
    is over. Beside its stages it has one line when it is ready and one at its end."""
    process = serve("--port", 0, "--internal-port", 0)
    ready = ready_line(process)
    assert "ready: tiny on CPU x86_64, 2048 KV tokens, 256 a request at most" in ready
    ports = re.search(r"API on 127.0.0.1:(\d+), probes and metrics on 127.0.0.1:(\d+)", ready)
    assert ports is not None
    port, internal = ports.groups()  # of the kernel's choice
    assert httpx.get(f"http://127.0.0.1:{internal}/readyz", timeout=limit(5)).status_code == 200
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=LONG, timeout=limit(60)) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.killpg(process.pid, signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, line = ends_with(process)
    assert code == 0
    assert "drained in" in line and "1 requests finished, 0 cut off" in line
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.process
def test_flags_count_and_a_warning_names_the_one_that_it_is_of(serve: Serve) -> None:
    process = serve(
        *("--port", 0, "--internal-port", 0),
        *("--keep-alive-seconds", 1, "--tool-call-parser", "Hermes"),
    )
    line = ready_line(process)
    assert "warning: tools are refused: the chat template does not read them; " in line
    assert "--tool-call-parser changes nothing" in line
    port = re.search(r"API on 127.0.0.1:(\d+)", ready_line(process))
    assert port is not None
    with socket.create_connection(("127.0.0.1", int(port[1])), limit(60)) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in idle.recv(1 << 16)
        while idle.recv(1 << 16):
            pass  # the end, which the default would bring after ten minutes


@pytest.mark.process
def test_a_run_killed_leaves_a_folder_that_the_next_removes(serve: Serve, tmp_path: Path) -> None:
    ports = ["--port", 0, "--internal-port", 0]
    process = serve(*ports)
    assert "ready: tiny" in ready_line(process)
    left = list((tmp_path / "tmp").iterdir())  # where the path is long, sockets have another place
    (folder,) = (each for each in left if each.name.startswith(PREFIX))
    assert not [file for file in folder.iterdir() if file.is_socket()]
    process.kill()
    assert process.communicate(timeout=limit(30))[1] == ""  # its children end without a traceback
    again = serve(*ports)
    eventually(lambda: not any(each.exists() for each in left), on="server")
    assert again.poll() is None


@pytest.mark.process
def test_a_budget_beyond_the_memory_is_one_line(serve: Serve) -> None:
    code, line = ends_with(serve("--kv-tokens", 10**9, "--port", 0, "--internal-port", 0))
    assert code == 40
    assert "--kv-tokens pins 1000000000 tokens" in line


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.process
@pytest.mark.parametrize(
    ("file", "harm", "named"),
    [
        ("tokenizer.json", cut, "tokenizer.json: truncated"),
        ("tokenizer_config.json", cut, "tokenizer_config.json: truncated"),
        ("config.json", cut, "config.json"),
    ],
    ids=["tokenizer", "settings", "config"],
)
def test_a_broken_model_file_ends_the_start_and_is_named(
    serve: Serve,
    tiny_model: Path,
    tmp_path: Path,
    file: str,
    harm: Callable[[Path], None],
    named: str,
) -> None:
    """F56: with the code for a model that is broken, in one line."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    harm(model / file)
    code, line = ends_with(serve("--port", 0, "--internal-port", 0, model=model))
    assert code == 31
    assert named in line


def test_the_parent_imports_neither_torch_nor_numpy_nor_pillow() -> None:
    """They would delay each start, and take memory from a CPU's KV cache."""
    code = (
        "import sys, kvline_server.parent.supervisor;"
        "print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
