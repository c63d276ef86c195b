"""Translates device errors: out of memory, or a failed device.

The one place that knows the error types and texts of torch, the CUDA runtime, its libraries and the
CPU's allocator. All work on a device runs inside `translated`; any other error is a bug and passes
through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryAllocation"
    r"|_ALLOC_FAILED|ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"CUDA (driver |runtime )?error|cudaError|CUDA_ERROR_|CUBLAS_STATUS_|CUDNN_STATUS_|NVRTC_ERROR_"
    r"|illegal memory access|illegal instruction|misaligned address|unspecified launch failure"
    r"|device-side assert|uncorrectable ECC|Xid",
    re.IGNORECASE,
)


@contextmanager
def translated(stage: str) -> Iterator[None]:
    """Raises DeviceOutOfMemory or DeviceFailure, with the stage's name, in place of the errors of
    torch and the driver."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = translate(stage, error)
        if known is None:
            raise
        raise known from error


def translate(stage: str, error: BaseException) -> DeviceOutOfMemory | DeviceFailure | None:
    """None for an error that is no device error."""
    text = str(error)
    line = f"{stage}: {text.splitlines()[0] if text else type(error).__name__}"
    if any(map(_is_out_of_memory, _chain(error))):
        return DeviceOutOfMemory(line)
    if isinstance(error, torch.AcceleratorError) or _matches(error, _FAILED):
        return DeviceFailure(f"the device failed at {line}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: when an allocation fails during a graph capture, ending the capture
    fails too, and only that error is raised."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _matches(
        error, _OUT_OF_MEMORY
    )


def _matches(error: BaseException, texts: re.Pattern[str]) -> bool:
    """Libraries raise plain RuntimeErrors; only their text shows the cause."""
    return isinstance(error, RuntimeError) and texts.search(str(error)[:2000]) is not None
