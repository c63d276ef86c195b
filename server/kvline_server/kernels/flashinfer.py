"""The backend for a CUDA GPU: FlashInfer's kernels, our Triton kernels, GEMMs."""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.kernels import cubins
from kvline_server.kernels.cuda_recurrent import CudaRecurrent
from kvline_server.kernels.flashinfer_attention import DEPTH
from kvline_server.kernels.gpu_attention import GpuAttention
from kvline_server.kernels.gpu_encoder import GpuEncoder
from kvline_server.kernels.gpu_experts import GpuExperts
from kvline_server.kernels.gpu_gemms import GpuGemms
from kvline_server.kernels.gpu_rows import GpuRows
from kvline_server.kernels.gpu_sampling import GpuSampling
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.interface import Fetch, Kernels
from kvline_server.kernels.pinned import PinnedCopies, upload


class FlashInferKernels(Kernels):
    depth = DEPTH

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        group: Group = ALONE,
        cache: torch.dtype = torch.bfloat16,
        windows: tuple[int, ...] = (0,),
        two_way: bool = False,
        encoder_dim: int = 0,
    ) -> None:
        """For shapes that cuda_write.check lets pass; `cache` is the KV cache's dtype, `windows`
        are those of the layers, `two_way` says whether tokens of an image see each other,
        `encoder_dim` is the head size of an encoder of images; 0: none. Raises RuntimeError or
        ImportError where kernels are missing."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.bfloat16
        self.group = group
        self.build = cubins.identity()
        shape = heads, kv_heads, dim
        self.attention = GpuAttention(self.device, self.dtype, shape, cache, windows, two_way)
        self.recurrent = CudaRecurrent(self.device)
        self.rows = GpuRows()
        self.gemms = GpuGemms(self.device, self.rows, group)
        self.experts = GpuExperts(self.gemms.formats.choices, self.rows, group)
        self.sampling = GpuSampling(self.device)
        self.encoder = GpuEncoder(self.device, encoder_dim)

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return upload(self.device, *arrays)

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return PinnedCopies(tensors)
