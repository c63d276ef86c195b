"""Faults put into a server under test from outside: Python imports this at start, before us.

KVLINE_FAULT_STEP=n:raise|oom|kill breaks the engine's n-th batch; KVLINE_FAULT_HTTP_BLOCK=s blocks
the HTTP process once for s seconds in a C call that holds the interpreter lock.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

STEP = os.environ.get("KVLINE_FAULT_STEP", "")
BLOCK = os.environ.get("KVLINE_FAULT_HTTP_BLOCK", "")
ALWAYS = os.environ.get("KVLINE_FAULT_ALWAYS", "")


def break_step() -> None:
    import kvline_server.engine.runner as module
    from kvline_server.errors import DeviceOutOfMemory

    number, kind = STEP.split(":")
    launch = module.Runner.launch
    count = 0

    def broken(self, batch):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count == int(number) or (ALWAYS and count > int(number)):
            if kind == "kill":
                os.kill(os.getpid(), 9)
            raise {"raise": RuntimeError, "oom": DeviceOutOfMemory}[kind]("injected")
        return launch(self, batch)

    module.Runner.launch = broken  # type: ignore[method-assign]


def block_http() -> None:
    import ctypes

    module: Any = importlib.import_module("kvline_server.http.app")
    original = module.read_object

    async def blocking(request):  # type: ignore[no-untyped-def]
        ctypes.PyDLL(None).usleep(int(float(BLOCK) * 1e6))
        return await original(request)

    module.read_object = blocking


arguments = " ".join(sys.orig_argv)
if STEP and "kvline_server.engine.process" in arguments:
    break_step()
if BLOCK and "kvline_server.http.process" in arguments:
    block_http()


def die_at_write() -> None:
    """F01: the operator ends right after (or before) its k-th write to the API server."""
    import kvline_operator.kube as module

    number, when = os.environ["KVLINE_FAULT_WRITE"].split(":")
    send = module.Kube._raw
    count = 0

    def counted(self, call):  # type: ignore[no-untyped-def]
        nonlocal count
        count += call.method != "GET"
        fatal = call.method != "GET" and count == int(number)
        if fatal and when == "before":
            os._exit(9)
        answer = send(self, call)
        if fatal:
            os._exit(9)
        return answer

    module.Kube._raw = counted  # type: ignore[method-assign]


if "KVLINE_FAULT_WRITE" in os.environ and "kvline_operator" in arguments:
    die_at_write()
