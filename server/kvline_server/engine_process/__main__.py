"""`python -m kvline_server.engine_process`. Imports are a large part of its start, so a CUDA
context is created beside them, and the garbage collector does not slow them down."""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from kvline_contract.launch import Device, LaunchConfig

# torch's shape functions for tracing and for tensors without data, of which an engine has neither.
TRACING = "torch._meta_registrations"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvline-engine")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--record")
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument(
        "--http-fd",
        type=int,
        action="append",
        required=True,
        help="socket to an HTTP process; once for each",
    )
    parser.add_argument(
        "--root", type=int, required=True, help="pid of the process tree whose memory counts"
    )
    parser.add_argument("--memory", type=int)
    parser.add_argument("--threads", type=int)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    gc.disable()  # imports make many objects, hardly any of them garbage
    sys.modules[TRACING] = ModuleType(TRACING)
    launch = LaunchConfig.parse(arguments.config.read_bytes())
    if launch.device is Device.CUDA:
        threading.Thread(target=create_context, daemon=True).start()
    from kvline_server.engine_process import loop  # imports torch

    gc.freeze()  # what is imported stays: no later collection visits it
    gc.enable()
    return loop.main(arguments, launch)


def create_context() -> None:
    """Creates the primary CUDA context of the first GPU, which torch then uses. Imports go on while
    the driver works. What fails here fails again in torch, which reports it."""
    with suppress(OSError, AttributeError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
