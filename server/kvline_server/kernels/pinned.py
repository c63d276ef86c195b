"""Copies between the host's pinned memory and a GPU, queued on the stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

ALIGN = 16  # bytes


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Kernels.upload."""
    *starts, size = accumulate((-(-a.nbytes // ALIGN) * ALIGN for a in arrays), initial=0)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pack(arrays, starts, host.numpy())
    uploaded = host.to(device, non_blocking=True)
    return [
        uploaded[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for start, array in zip(starts, arrays, strict=True)
    ]


def pack(arrays: Sequence[np.ndarray], starts: Sequence[int], host: np.ndarray) -> None:
    """To `host`, uint8, the numbers of each, in order of rows whatever its strides."""
    for start, array in zip(starts, arrays, strict=True):
        numbers = np.ascontiguousarray(array).reshape(-1)
        host[start : start + array.nbytes] = numbers.view(np.uint8)


class PinnedCopies:
    """Copies to pinned host memory, queued on the stream behind the step; an event ends them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self.host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.done.record()

    def wait(self) -> list[np.ndarray]:
        self.done.synchronize()
        return [tensor.numpy() for tensor in self.host]
