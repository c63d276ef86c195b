"""Every operation of a step in plain torch: the CPU backend, the reference for the tests, and the
fallback on GPUs without prebuilt kernels."""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.interface import Fetch, Kernels
from kvline_server.kernels.torch_attention import TorchAttention
from kvline_server.kernels.torch_encoder import TorchEncoder
from kvline_server.kernels.torch_experts import TorchExperts
from kvline_server.kernels.torch_gemms import TorchGemms
from kvline_server.kernels.torch_recurrent import TorchRecurrent
from kvline_server.kernels.torch_rows import TorchRows
from kvline_server.kernels.torch_sampling import TorchSampling


class _HostArrays:
    """A Fetch that is complete at once: a view on the CPU, a blocking copy on a GPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.arrays = [tensor.cpu().numpy() for tensor in tensors]

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class TorchKernels(Kernels):
    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        depth: int = 0,
        device: str = "cpu",
        group: Group = ALONE,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.depth = depth  # tests set 1 for the order of steps that a GPU has
        self.group = group
        self.rows = TorchRows()
        self.attention = TorchAttention(self.device, dtype, self.rows)
        self.recurrent = TorchRecurrent(self.device)
        self.gemms = TorchGemms(self.device, dtype, self.rows, group)
        self.experts = TorchExperts(self.rows)
        self.sampling = TorchSampling()
        self.encoder = TorchEncoder()

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return _HostArrays(tensors)
