"""What the process of a rank does before it imports torch. Imports are a large part of its start,
so a CUDA context is created beside them, and the garbage collector does not slow them down. What
OpenMP reads of the environment it reads then."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from kvline_contract.launch import Device, LaunchConfig

# torch's shape functions for tracing and for tensors without data, of which an engine has neither.
TRACING = "torch._meta_registrations"
# Objects made and not freed before young ones are visited for cycles. A step makes thousands, of
# which none are in one: at Python's 700 collections took a tenth of the host's time of a step.
YOUNG_OBJECTS = 100_000


@contextmanager
def importing(launch: LaunchConfig, rank: int) -> Iterator[None]:
    gc.disable()  # imports make many objects, hardly any of them garbage
    sys.modules[TRACING] = ModuleType(TRACING)
    if launch.device is Device.CPU:
        # Threads that spin while they wait take the cores from those that they wait for, wherever
        # a node's pods share them (decisions/038).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    else:
        threading.Thread(target=create_context, args=(rank,), daemon=True).start()
    yield
    collect_rarely()
    gc.enable()


def collect_rarely() -> None:
    gc.freeze()  # what is imported stays: no later collection visits it
    gc.set_threshold(YOUNG_OBJECTS)


def create_context(rank: int) -> None:
    """Creates the primary CUDA context of the rank's GPU, which torch then uses. Imports go on
    while the driver works. What fails here fails again in torch, which reports it."""
    with suppress(OSError, AttributeError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), rank) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
