"""CPU time of the HTTP process a token, with a tiny model on the CPU: 64 requests at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import raw_http
from raw_http import Asked
from record import record, table
from serving import free_port, running
from shapes import write_tokenizer

ROUNDS, REQUESTS, OUTPUT, PROMPT = 3, 200, 200, 16
VOCABULARY = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": None,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}


def run() -> None:
    """KVLINE_BENCH_SERVER: the `server` folder of another checkout, to compare."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_tokenizer(folder, VOCABULARY)
        port, internal = free_port(), free_port()
        command = [sys.executable, "-m", "kvline_server", "serve", "--model", str(folder)]
        command += ["--load", "random", "--device", "cpu", "--memory", "2Gi", "--threads", "1"]
        command += ["--served-name", "m", "--port", str(port), "--internal-port", str(internal)]
        command += ["--max-running-requests", "64", "--max-model-len", "512"]
        command += ["--state-dir", str(Path(scratch, "state"))]
        other = os.environ.get("KVLINE_BENCH_SERVER")
        env = os.environ | ({"PYTHONPATH": other} if other else {})
        with running(command, internal, subprocess.Popen.terminate, env=env):
            process = _http_process(port)
            for stream in (False, True):
                rows.append(_measure(port, process, stream))
    title = f"HTTP process, {REQUESTS} requests of {OUTPUT} tokens, best and worst of {ROUNDS}"
    table(title, ["answers", "CPU us a token", "tokens an event", "tok/s"], rows)


def _measure(port: int, process: int, stream: bool) -> list[str]:
    costs, events, rates = [], [], []
    prompt = [7] * PROMPT
    raw_http.play(port, [Asked(prompt, 8)] * 8, stream)
    for _ in range(ROUNDS):
        before = _cpu(process)
        begun = time.monotonic()
        answers = raw_http.play(port, [Asked(prompt, OUTPUT)] * REQUESTS, stream, seed=1)
        rates.append(REQUESTS * OUTPUT / (time.monotonic() - begun))
        costs.append((_cpu(process) - before) * 1e6 / (REQUESTS * OUTPUT))
        events.append(REQUESTS * OUTPUT / max(1, sum(len(a.pieces) for a in answers)))
    name = "streamed" if stream else "whole"
    record(f"http-cpu-us-{name}", min(costs), "us", (min(costs), max(costs)))
    shown = f"{sum(events) / ROUNDS:.2f}" if stream else ""
    return [name, f"{min(costs):.1f}; {max(costs):.1f}", shown, f"{max(rates):.0f}"]


def _http_process(port: int) -> int:
    """The child of the server that was started with this port."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes come and go
            if b"kvline_server.http.process" not in (folder / "cmdline").read_bytes():
                continue
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if str(port) in Path("/proc", parent, "cmdline").read_text().split("\0"):
                return int(folder.name)
    raise RuntimeError("the server's HTTP process was not found")


def _cpu(process: int) -> float:
    """Seconds of user and system time that the process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
