"""Copies between the host's pinned memory and a GPU, queued on the stream."""

from __future__ import annotations

import numpy as np
import torch


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Kernels.upload."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // 16) * 16
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    packed = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    uploaded = host.to(device, non_blocking=True)
    return [
        uploaded[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for start, array in zip(starts, arrays, strict=True)
    ]


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
