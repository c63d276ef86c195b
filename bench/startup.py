"""Startup time from the command to Validated, with imports: with a search, from its record, and of
the spec that users write, without maxModelLen."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import demo_engines
import left
import offline
import peers
import torch
from record import record, table
from shapes import write_config

from kvline_contract.codec import decode
from kvline_contract.memory import COLLECTIVES, Memory
from kvline_contract.report import SizingReport
from kvline_server.ipc.sampling_params import SamplingParams

SHOWN = 20  # milliseconds of a stage


def size(folder: Path, *words: str) -> tuple[float, dict[str, object]]:
    seconds, report, _ = measured(folder, *words)
    return seconds, report


def measured(folder: Path, *words: str) -> tuple[float, dict[str, object], int]:
    """-> seconds, the report, and MiB of host memory that the largest process had at its peak"""
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(folder), "--json"]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        text = lines.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return seconds, dict(json.loads(text)), usage.ru_maxrss >> 10


def run() -> None:
    """On a GPU both shapes with random weights, else the demo model in 2 GiB;
    KVLINE_BENCH_KV_CACHE=fp8 quantises the KV cache, KVLINE_BENCH_LENGTHS=given leaves out the
    start without a length."""
    rows, given = [], os.environ.get("KVLINE_BENCH_LENGTHS") == "given"
    if torch.cuda.is_available():
        length, cache = str(offline.MAX_MODEL_LEN), offline.only_cache()
        for name in offline.models():
            with tempfile.TemporaryDirectory() as scratch:
                folder = write_config(name, Path(scratch))
                words = ["--load", "random", "--gpus", str(peers.GPUS)]
                words += ["--kv-cache-dtype", str(cache)]
                label = offline.label(name, cache)
                rows += starts(label, folder, *words, "--max-model-len", length)
                if not given:
                    rows.append(without_length(label, folder, *words))
                    answer_longest(name)
    else:
        rows += starts("smollm2", demo_engines.folder(), "--memory", "2Gi")
    head = ["model", "start", "seconds", "of them loop", "KV tokens", "source", "of a search"]
    table("From the command to Validated", head, rows)


def starts(name: str, folder: Path, *words: str) -> list[list[str]]:
    """Starts twice with a search, and once from the record of the first."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = str(Path(scratch) / "records.json")
        made = {
            "first": size(folder, *words, "--write-record", kept),
            "again": size(folder, *words),
            "recorded": size(folder, *words, "--record", kept),
        }
    rows, sizes = [], []
    for kind, (seconds, report) in made.items():
        result, gpu = report["result"], str(dict(report["provenance"])["gpu"])  # type: ignore[call-overload]
        assert isinstance(result, dict)
        on = gpu if torch.cuda.is_available() else None
        record(f"startup-{kind}-s-{name}", seconds, "s", (seconds, seconds), on)
        sizes.append(int(result["kvTokens"]))
        part = f"{seconds / made['again'][0]:.2f}" if kind == "recorded" else ""
        figures = [f"{seconds:.1f}", f"{int(result['loopMs']) / 1000:.1f}"]
        rows.append([name, kind, *figures, str(result["kvTokens"]), result["source"], part])
        print(f"{name}, {kind}:", *parts(report), sep="\n  ", flush=True)
    record(f"kv-tokens-{name}", sizes[0], "tokens", (min(sizes), max(sizes)), on)
    found = SizingReport.parse(json.dumps(made["first"][1])).result
    assert found is not None
    share = left.share(found)
    record(f"kv-tokens-of-left-{name}", share, "", (share, share), on)
    print(left.line(name, found), flush=True)
    if peers.GPUS > 1:
        taken = max(collectives(report) for _, report in made.values())
        record(f"collectives-mib-tp{peers.GPUS}", taken, "MiB", (taken, taken), on)
        print(f"collectives: {taken} MiB a rank", flush=True)
    return rows


def without_length(name: str, folder: Path, *words: str) -> list[str]:
    seconds, report, host = measured(folder, *words)
    result, gpu = report["result"], str(dict(report["provenance"])["gpu"])  # type: ignore[call-overload]
    assert isinstance(result, dict)
    tokens = int(result["kvTokens"])
    record(f"startup-default-s-{name}", seconds, "s", (seconds, seconds), gpu)
    record(f"start-host-mib-{name}", host, "MiB", (host, host), gpu)
    record(f"kv-tokens-default-{name}", tokens, "tokens", (tokens, tokens), gpu)
    print(f"{name}, default:", *parts(report), f"host memory {host} MiB", sep="\n  ", flush=True)
    figures = [f"{seconds:.1f}", f"{int(result['loopMs']) / 1000:.1f}"]
    return [name, "default", *figures, str(tokens), result["source"], ""]


def answer_longest(name: str) -> None:
    """One prompt of the whole context that such a start says is served."""
    engine, result = offline.start(name, max_model_len=None)
    length = engine.max_model_len - 1
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.submit(0, [i % 1000 for i in range(length)], params)
    began = time.perf_counter()
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    seconds = time.perf_counter() - began
    assert [output.finish for output in outputs] == ["length"]
    print(
        f"{name}: a prompt of {length} tokens of {result.kv_tokens} in {seconds:.1f} s", flush=True
    )
    engine.executor.resize((0,) * len(engine.executor.pages))
    del engine, outputs
    gc.collect()  # else the next start may find this one's weights
    torch.cuda.empty_cache()


def collectives(report: dict[str, Any]) -> int:
    """MiB of the rank that has most."""
    return max(
        decode(Memory, rank, strict=True).mib(COLLECTIVES) for rank in report["result"]["ranks"]
    )


def parts(report: dict[str, Any]) -> list[str]:
    """Where the time of a start went, and what the memory of its size is."""
    stages = [f"{s['name']} {s['ms']} ms" for s in report["stages"] if s["ms"] >= SHOWN]
    found = report["result"]["memory"].items()
    memory = [f"{name[:-3]} {mib}" for name, mib in found if name.endswith("MiB")]
    return [", ".join(stages), f"MiB: {', '.join(memory)}"]
