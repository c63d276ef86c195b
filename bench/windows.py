"""What layers with sliding windows leave to the KV cache once they free what they left behind: KV
tokens of Gemma-3-12B with 128 requests, against those that the same memory holds if all is kept;
then the worst allowed mix beside them. KVLINE_BENCH_SECONDS is its duration (180)."""

from __future__ import annotations

import os

import left
import offline
import soak
import torch
from record import record, table
from shapes import SHAPES

from kvline_contract.memory import KV_CACHE, WINDOWS

NAME, RUNNING = "gemma12b", 128
MIB = 1 << 20


def run() -> None:
    seconds = float(os.environ.get("KVLINE_BENCH_SECONDS", "180"))
    engine, result = offline.start(NAME, running=RUNNING, headroom_mib=0)
    gpu, memory = torch.cuda.get_device_name(0), result.memory
    every = memory.mib(KV_CACHE) + memory.mib(WINDOWS)
    kept = every * MIB // result.compared_bytes
    ratio = result.kv_tokens / kept
    record(f"kv-tokens-{NAME}", result.kv_tokens, "tokens", (result.kv_tokens,) * 2, gpu)
    record(f"kv-tokens-window-ratio-{NAME}", ratio, "", (ratio, ratio), gpu)
    print(left.line(NAME, result), flush=True)
    head = ["KV tokens", "KV cache MiB", "windows MiB", "if all is kept", "ratio"]
    figures = [result.kv_tokens, memory.mib(KV_CACHE), memory.mib(WINDOWS), kept]
    table(f"{NAME}, {RUNNING} requests", head, [[*map(str, figures), f"{ratio:.2f}"]])
    found = soak.soak(engine, SHAPES[NAME].vocabulary, seconds)
    soak.keep(NAME, found, seconds, gpu)
    cells = found.cells
    table(f"Worst allowed mix at headroom 0, {seconds:.0f} s", soak.HEAD[2:][: len(cells)], [cells])
