"""What a device's error means: memory that was refused, or a device that failed.

The one place that knows the types and texts of torch, the CUDA runtime, its libraries and the CPU's
allocator. Everything that asks a device for work does it inside `named`; anything else that goes
wrong is a fault of ours and passes through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory

_REFUSED = re.compile(
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
def named(stage: str) -> Iterator[None]:
    """Raises DeviceOutOfMemory or DeviceFailure with the stage's name, in place of the errors that
    mean so."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = meaning(stage, error)
        if known is None:
            raise
        raise known from error


def meaning(stage: str, error: BaseException) -> DeviceOutOfMemory | DeviceFailure | None:
    """None for an error that is not the device's."""
    text = str(error)
    line = f"{stage}: {text.splitlines()[0] if text else type(error).__name__}"
    if any(map(_refused, _chain(error))):
        return DeviceOutOfMemory(line)
    if isinstance(error, torch.AcceleratorError) or _is(error, _FAILED):
        return DeviceFailure(f"the device failed at {line}")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those it came of: ending a capture in which memory was refused fails too, and
    that is what is seen."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _refused(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _is(error, _REFUSED)


def _is(error: BaseException, texts: re.Pattern[str]) -> bool:
    """Libraries raise plain RuntimeErrors, whose first lines tell."""
    return isinstance(error, RuntimeError) and texts.search(str(error)[:2000]) is not None
