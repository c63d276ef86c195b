"""Faults put into a server under test from outside: Python imports this at start, before us.

KVLINE_FAULT_STEP=n:raise|oom|kill|signal|nan|device|spin|garble breaks the engine's n-th batch;
after `kill`, of the first start alone, the parent sees a kernel that killed for memory, after
`signal` it does not; `spin` takes KVLINE_FAULT_SPIN seconds of CPU time more; from `garble` on the
parent cannot read what it is sent; with KVLINE_FAULT_ALWAYS the n-th batch of every start and all
after it;
KVLINE_FAULT_MEMORY=stage:n makes torch allocate too much in the n-th call of a stage (OF_STAGES),
on KVLINE_FAULT_DEVICE, and writes this value to the file KVLINE_FAULT_MARK;
KVLINE_FAULT_RANK says which rank of several breaks so, by default the first;
KVLINE_FAULT_HTTP_BLOCK=s blocks the HTTP process once for s seconds in a C call that holds the
interpreter lock; KVLINE_FAULT_FRAMES=engine|http|parent makes what that process sends (of the
engine, its answers) unreadable;
KVLINE_FAULT_FREE=MIB makes of the machine's free memory so much and what there is beyond whole GiB;
KVLINE_WATCH_LOOP=file is of loopwatch.py, KVLINE_FORCED=file of forced.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

STEP = os.environ.get("KVLINE_FAULT_STEP", "")
BLOCK = os.environ.get("KVLINE_FAULT_HTTP_BLOCK", "")
ALWAYS = os.environ.get("KVLINE_FAULT_ALWAYS", "")
KILLS = Path(os.environ.get("KVLINE_FAULT_KILLS", "/nowhere"))  # a byte for each kill


def break_step() -> None:
    import torch

    import kvline_server.worker.worker as module

    number, kind = STEP.split(":")
    if kind == "kill" and not ALWAYS and KILLS.exists():
        return  # a start that tries a second size may reach that number of steps too
    forward = module.Worker._forward
    count = 0

    def broken(self, step):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count == int(number) or (ALWAYS and count > int(number)):
            if kind == "kill":
                with KILLS.open("a") as file:
                    file.write("k")
            if kind in ("kill", "signal"):
                os.kill(os.getpid(), 9)
            if kind == "spin":
                end = time.process_time() + float(os.environ["KVLINE_FAULT_SPIN"])
                while time.process_time() < end:
                    pass
                return forward(self, step)
            if kind == "garble":
                garble_frames("kvline_server.ipc.messages")
                return forward(self, step)
            if kind == "nan":
                return forward_nan(self, step)
            if kind == "oom":
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 1 GiB: injected"
                )
            if kind == "device":
                raise torch.AcceleratorError("CUDA error: an illegal memory access: injected")
            raise RuntimeError("injected")
        return forward(self, step)

    def forward_nan(self: Any, step: Any) -> Any:
        found = forward(self, step)
        found._hidden = found._hidden * float("nan")
        return found

    module.Worker._forward = broken  # type: ignore[method-assign]


def slow_copies() -> None:
    """A volume that gives each part of a tensor after so many seconds."""
    import time

    import kvline_server.model.loader as module

    copy = module.SafetensorsSource.copy

    def slow(self: Any, part: Any, into: Any, column: int = 0) -> None:
        time.sleep(float(os.environ["KVLINE_FAULT_COPY"]))
        copy(self, part, into, column)

    module.SafetensorsSource.copy = slow  # type: ignore[method-assign]


def block_http() -> None:
    import ctypes

    module: Any = importlib.import_module("kvline_server.http.planning")
    original = module.read_json

    async def blocking(*of):  # type: ignore[no-untyped-def]
        ctypes.PyDLL(None).usleep(int(float(BLOCK) * 1e6))
        return await original(*of)

    module.read_json = blocking


def garble_frames(module: str) -> None:
    """What this process sends, or its outbox alone, cannot be understood."""
    patched: Any = importlib.import_module(module)
    patched.encode = lambda message: b"\x03\0\0\0abc"


def count_kills() -> None:
    """In the parent, in place of the kernel's count, as in a container."""
    module: Any = importlib.import_module("kvline_server.memory.device")
    module.counts_own_kills = lambda: True
    module.oom_kills = lambda: KILLS.stat().st_size if KILLS.exists() else 0


OF_STAGES = {
    "load": ("kvline_server.model.loader", "SafetensorsSource", "copy"),
    "tune": ("kvline_server.kernels.torch_gemms", "TorchGemms", "tune"),
    "row-counts": ("kvline_server.worker.worker", "Worker", "warm_up"),
    "capture": ("kvline_server.worker.worker", "Worker", "capture"),
    "states": ("kvline_server.memory.state_arena", "StateArena", "_allocate"),
    "resize": ("kvline_server.memory.arena", "HostArena", "resize"),
    "step": ("kvline_server.worker.worker", "Worker", "_launch"),
}
DEVICE = os.environ.get("KVLINE_FAULT_DEVICE", "cpu")
if DEVICE == "cuda":
    OF_STAGES |= {
        "load": ("kvline_server.model.loader", "RandomSource", "copy"),
        "tune": ("kvline_server.kernels.gpu_gemms", "GpuGemms", "tune"),
        "resize": ("kvline_server.memory.cuda", "CudaArena", "resize"),
    }


def run_out_of_memory() -> None:
    stage, number = os.environ["KVLINE_FAULT_MEMORY"].split(":")
    module, owner, name = OF_STAGES[stage]
    patched: Any = getattr(importlib.import_module(module), owner)
    original, count = getattr(patched, name), 0

    def broken(*values: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == int(number):
            if "KVLINE_FAULT_MARK" in os.environ:
                Path(os.environ["KVLINE_FAULT_MARK"]).write_text(os.environ["KVLINE_FAULT_MEMORY"])
            torch: Any = importlib.import_module("torch")
            torch.empty(1 << 62, dtype=torch.uint8, device=DEVICE)
        return original(*values, **named)

    setattr(patched, name, broken)


def take_free_memory() -> None:
    """To fill half of a large machine takes half a minute. What is free differs from one
    reading to the next as it does."""
    module: Any = importlib.import_module("kvline_server.memory.device")
    read, least = module.machine_memory, int(os.environ["KVLINE_FAULT_FREE"]) << 20

    def little() -> tuple[int, int]:
        total, free = read()
        return total, min(free, least + free % (1 << 30))

    module.machine_memory = little


def own_rank() -> int:
    """Of this process, which is one of an engine's."""
    if RANK not in arguments:
        return 0
    found: int = importlib.import_module("json").loads(arguments[-1])["rank"]
    return found


arguments = sys.orig_argv
ENGINE, HTTP = "kvline_server.engine_process", "kvline_server.http.process"
RANK = f"{ENGINE}.rank"
OF_ENGINE = ENGINE in arguments or RANK in arguments
BREAKS = OF_ENGINE and own_rank() == int(os.environ.get("KVLINE_FAULT_RANK", "0"))
if "KVLINE_FAULT_MEMORY" in os.environ and BREAKS:
    run_out_of_memory()
if STEP and BREAKS:
    break_step()
elif STEP and not OF_ENGINE and HTTP not in arguments:
    count_kills()
if "KVLINE_FAULT_FREE" in os.environ:
    take_free_memory()
if "KVLINE_FORCED" in os.environ and ENGINE in arguments:
    importlib.import_module("forced").force(os.environ["KVLINE_FORCED"])
if "KVLINE_FAULT_COPY" in os.environ and ENGINE in arguments:
    slow_copies()
OWN = "engine" if OF_ENGINE else "http" if HTTP in arguments else "parent"
if os.environ.get("KVLINE_FAULT_FRAMES") == OWN:
    garble_frames(f"kvline_server.{'engine_process.outbox' if OF_ENGINE else 'ipc.messages'}")
if BLOCK and HTTP in arguments:
    block_http()


def die_at_write() -> None:
    """F01: the operator ends right after (or before) its k-th write to the API server."""
    import kvline_operator.kube as module

    number, when = os.environ["KVLINE_FAULT_WRITE"].split(":")
    send = module.Kube._raw
    count = 0

    def counted(self, call):  # type: ignore[no-untyped-def]
        nonlocal count
        write = call.method != "GET" and "/leases" not in call.path  # which is renewed, any time
        count += write
        fatal = write and count == int(number)
        if fatal and when == "before":
            os._exit(9)
        answer = send(self, call)
        if fatal:
            os._exit(9)
        return answer

    module.Kube._raw = counted  # type: ignore[method-assign]


if "KVLINE_FAULT_WRITE" in os.environ and "kvline_operator" in arguments:
    die_at_write()

if "KVLINE_WATCH_LOOP" in os.environ:
    importlib.import_module("loopwatch").watch(os.environ["KVLINE_WATCH_LOOP"])
