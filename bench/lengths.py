"""Memory of a container at its validated budget under traffic that once made it grow.

Distinct prompt lengths, long prompts with logprobs, and a text far beyond the context, against
`kvline-server serve` in a memory cgroup of 2 GiB. Prints the memory in use every few requests and
the peak: memory that keeps growing ends in a kill.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cgroups
import demo_engines
import serving
from record import record, table

LIMIT = 2 << 30
V2 = cgroups.is_v2()
MEMORY = cgroups.MOUNT if V2 else cgroups.MOUNT / "memory"
# In cgroup v1 and v2: files, and what counts as used.
LIMIT_FILE = "memory.max" if V2 else "memory.limit_in_bytes"
USED = ("anon", "shmem") if V2 else ("total_rss", "total_shmem")
KILLS = "memory.events" if V2 else "memory.oom_control"
MIB = 1 << 20
SHOWN = 8  # rows of the table
LAYERS = int(os.environ.get("KVLINE_BENCH_LAYERS", "0"))


@contextmanager
def container(name: str) -> Iterator[Path]:
    """A memory cgroup of LIMIT bytes."""
    folder = MEMORY / name
    if V2:
        (MEMORY / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir(exist_ok=True)
    (folder / LIMIT_FILE).write_text(str(LIMIT))
    try:
        yield folder
    finally:
        folder.rmdir()


@contextmanager
def model() -> Iterator[list[str]]:
    """Flags of the model: whole, or LAYERS of its layers with random weights. All layers have the
    same shapes, and it is for shapes that memory was kept."""
    whole = Path(os.environ.get("KVLINE_TEST_MODEL") or demo_engines.folder())
    if not LAYERS:
        yield ["--model", str(whole)]
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(whole, folder, ignore=weights, dirs_exist_ok=True)
        config = json.loads((whole / "config.json").read_text())
        config["num_hidden_layers"] = LAYERS
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield ["--model", folder, "--load", "random"]


@contextmanager
def served(group: Path) -> Iterator[int]:
    """A server inside it, ready. -> its port"""
    port, internal = serving.free_port(), serving.free_port()
    threads = os.environ.get("KVLINE_BENCH_THREADS", str(demo_engines.THREADS))
    command = [sys.executable, "-m", "kvline_server", "serve", "--served-name", "m"]
    command += ["--port", str(port), "--internal-port", str(internal), "--threads", threads]
    command += ["--device", "cpu"]
    with tempfile.TemporaryDirectory() as state, model() as words:
        command += ["--state-dir", state, *words]

        def join_group() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        with serving.running(command, internal, preexec_fn=join_group):
            yield port


def used(group: Path) -> float:
    """MiB in use without page cache."""
    lines = (group / "memory.stat").read_text().splitlines()
    stat = {key: int(value) for key, value in (line.split() for line in lines)}
    return sum(stat[key] for key in USED) / MIB


def kills(group: Path) -> str:
    lines = (group / KILLS).read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("oom_kill "))


def status(port: int, body: dict[str, Any]) -> int:
    """HTTP status of a completion, after its body. Raises OSError when the server is gone."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    raw = json.dumps({"model": "m", "ignore_eos": True, **body}, ensure_ascii=False).encode()
    line.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    answer = line.getresponse()
    answer.read()
    line.close()
    return answer.status


def ask(port: int, prompt: list[int]) -> None:
    code = status(port, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    if code != 200:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens was answered {code}")


def play(port: int, group: Path, count: int) -> list[list[float]]:
    """Sends prompts of `count` distinct lengths. -> rows of requests so far and MiB in use"""
    rng = random.Random(0)
    lengths = rng.sample(range(1, count + 1), count)
    seen = [[0.0, used(group)]]
    for number, length in enumerate(lengths, 1):
        ask(port, [rng.randrange(10, 49_000) for _ in range(length)])
        if number % max(1, count // SHOWN) == 0:
            seen.append([float(number), used(group)])
            print(f"  {number}: {seen[-1][1]:.1f} MiB", flush=True)
    return seen


def heavy(port: int, group: Path) -> list[list[str]]:
    """Four prompts of 8,000 ids scored with top-20 at once, then 2 MB of emoji: status and peak."""
    rng = random.Random(1)
    scored = {"max_tokens": 1, "prompt_logprobs": 20}
    prompts = [[rng.randrange(10, 49_000) for _ in range(8000)] for _ in range(4)]
    rows = []
    for what, bodies in (
        ("four prompts of 8,000 ids, top-20", [{"prompt": p, **scored} for p in prompts]),
        ("480,000 emoji", [{"prompt": "\U0001f600" * 480_000, "max_tokens": 1}]),
    ):
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [pool.submit(status, port, body) for body in bodies]
            peak = 0.0
            while not all(one.done() for one in asked):
                peak = max(peak, used(group))
                time.sleep(0.05)
        codes = " ".join(str(one.result()) for one in asked)
        rows.append([what, codes, f"{peak:.1f}", f"{used(group):.1f}"])
    return rows


def run() -> None:
    """KVLINE_BENCH_LENGTHS: number of lengths (2,000); KVLINE_BENCH_LAYERS: of the model's layers;
    KVLINE_BENCH_THREADS: engine threads; KVLINE_TEST_MODEL: the demo model's folder, which needs no
    weights where layers are given."""
    if not MEMORY.is_dir() or os.geteuid() != 0:
        print("lengths needs root and memory cgroups")
        return
    count = int(os.environ.get("KVLINE_BENCH_LENGTHS", "2000"))
    with container(f"kvline-lengths-{os.getpid()}") as group, served(group) as port:
        seen = play(port, group, count)
        large = heavy(port, group)
        killed = kills(group)
    grew = seen[-1][1] - seen[0][1]
    name = f"lengths-{count}{f'-layers-{LAYERS}' if LAYERS else ''}-grew"
    record(name, grew, "MiB", (0, max(mib for _, mib in seen) - seen[0][1]))
    rows = [[f"{number:.0f}", f"{mib:.1f}"] for number, mib in seen]
    table(f"{count} prompts of different lengths in 2 GiB", ["requests", "MiB used"], rows)
    head = ["requests", "status", "MiB at most", "MiB after"]
    table(f"Large requests in 2 GiB; killed for memory: {killed}", head, large)
