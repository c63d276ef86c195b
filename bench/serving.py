"""r512 over HTTP against the engine alone, and with 20 alternatives of each prompt token, as base64
arrays. Chat is in chat.py, few requests in decode.py."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import offline
import peers
import raw_http
import torch
from raw_http import Asked
from record import record, table
from shapes import SHAPES, write_config, write_tokenizer
from workloads import WORKLOADS, Workload

SCORED = "http-lp20"
# Ways over HTTP, and their fields. Prompts must differ between them, or they would be cached.
WAYS: dict[str, dict[str, Any]] = {
    "http": {"stream": False},
    "http-streaming": {"stream": True},
    SCORED: {"stream": False, "prompt_logprobs": 20, "prompt_logprobs_format": "base64"},
}


def run() -> None:
    """KVLINE_BENCH_MODELS selects models."""
    rows = []
    for name in offline.models("llama8b"):
        base, gpu = alone(name)
        for kind in WAYS:
            rows.append([name, f"{kind}: engine alone", f"{base[kind]:.0f}", ""])
        with served(name) as port:
            for kind, fields in WAYS.items():
                rate = over_http(port, name, kind, fields)
                ratio = rate / base[kind]
                record(f"{kind}-r512-{name}", rate, "tokens/s", (rate, rate), gpu)
                record(f"{kind}-ratio-{name}", ratio, "ratio", (ratio, ratio), gpu)
                rows.append([name, kind, f"{rate:.0f}", f"{ratio:.3f}"])
                print(rows[-1], flush=True)
    table("r512 over HTTP, token-id prompts", ["model", "path", "tokens/s", "of the engine"], rows)


def alone(name: str) -> tuple[dict[str, float], str]:
    """Throughput of each way's workload on the engine without a server, and the GPU's name; in a
    process of its own, which frees the GPU at its end."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_alone, (name,))


def _alone(name: str) -> tuple[dict[str, float], str]:
    engine, _ = offline.start(name)
    rates = {kind: offline.rate(engine, name, workload(kind)) for kind in ("http", SCORED)}
    return {kind: rates.get(kind, rates["http"]) for kind in WAYS}, torch.cuda.get_device_name(0)


def workload(kind: str) -> Workload:
    return WORKLOADS["r512lp-top20" if kind == SCORED else "r512"]


@contextlib.contextmanager
def served(
    name: str, gpus: int = peers.GPUS, prepare: Callable[[Path], object] = lambda folder: None
) -> Iterator[int]:
    """A server as `kvline-server serve` starts it, ready; `prepare` changes the model's folder
    before. -> its port"""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_config(name, Path(scratch))
        write_tokenizer(folder, SHAPES[name].vocabulary)
        prepare(folder)
        port, internal = free_port(), free_port()
        command = [sys.executable, "-m", "kvline_server", "serve", "--model", str(folder)]
        command += ["--load", "random", "--served-name", "m", "--port", str(port)]
        command += ["--internal-port", str(internal), "--max-model-len", "8192"]
        command += ["--gpus", str(gpus)]
        with running(command, internal, subprocess.Popen.kill):
            yield port


@contextlib.contextmanager
def running(
    command: list[str],
    port: int,
    end: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.terminate,
    path: str = "/readyz",
    **options: Any,
) -> Iterator[None]:
    """A server that is ready at this port; it is ended with the block. `options` of Popen."""
    process = subprocess.Popen(command, **options)
    try:
        wait_ready(process, port, path)
        yield
    finally:
        end(process)
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2)
            return
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def over_http(port: int, name: str, kind: str, fields: dict[str, Any]) -> float:
    """Tokens per second."""
    played, shift = workload(kind), list(WAYS).index(kind)
    requests = played.make(SHAPES[name].vocabulary)
    asked = [Asked([id + shift for id in p], o) for p, o in requests]
    raw_http.play(port, asked[:8], **fields)
    answers = raw_http.play(port, asked, temperature=played.temperature, **fields)
    return sum(len(a.prompt) + a.output for a in asked) / max(a.ended for a in answers)
