"""`python -m kvline_server.engine_process`. Imports are a large part of its start, so a CUDA
context is created beside them, and the garbage collector does not slow them down."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from contextlib import suppress
from types import ModuleType

from kvline_contract.launch import Device, LaunchConfig
from kvline_server.options import EngineArguments

# torch's shape functions for tracing and for tensors without data, of which an engine has neither.
TRACING = "torch._meta_registrations"


def main(argv: list[str]) -> int:
    arguments = EngineArguments.parse(argv[0])
    gc.disable()  # imports make many objects, hardly any of them garbage
    sys.modules[TRACING] = ModuleType(TRACING)
    launch = LaunchConfig.parse(arguments.options.config.read_bytes())
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
