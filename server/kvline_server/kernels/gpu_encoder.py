"""Encoders on a GPU: FlashInfer's fa3 over sequences of any lengths, our Triton kernels around it,
and GELU within a GEMM by cuBLASLt.

Source of the calls: flashinfer.prefill, version 0.6.18. Beyond the end of a sequence fa3 multiplies
the next one's values by 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import MaskMode, PosEncodingMode, TensorLayout

from kvline_server.kernels import cuda_encoder
from kvline_server.kernels.encoder import Angles, Encoder, Norm
from kvline_server.kernels.pinned import upload

TILE = {64: 192, 128: 128}  # rows of a block of fa3, by head size
ALIKE = 4096  # blocks of a head, beyond which all heads have one schedule
WORK = 7 * 4  # bytes of a block in a plan
SPARE = 1 << 10  # bytes of its other parts, beside one number a processor


@dataclass(frozen=True, slots=True)
class Plan:
    heads: int
    dim: int
    module: Any
    ints: torch.Tensor  # on the device
    info: Any
    starts: torch.Tensor  # int32 [sequences + 1], on the device


class GpuEncoder(Encoder):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None
        self._floats = torch.empty(16, dtype=torch.uint8, device=device)  # fa3 has none
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def memory(self) -> AbstractContextManager[object]:
        """Segments of a pool are neither freed by empty_cache() nor used outside of it: what the
        stress took of a tower cannot become KV cache."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool, self.device)

    def plan(self, lengths: Sequence[int], heads: int, dim: int) -> Plan:
        wide, rows = cuda_encoder.places(dim), sum(lengths)
        kinds = (*[torch.bfloat16] * 3, torch.int32)
        none = PosEncodingMode["NONE"].value
        module = get_batch_prefill_module("fa3", *kinds, wide, wide, none, False, False, False)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        of_head = -(-rows // TILE[wide]) + len(lengths) - 1  # blocks at most
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = WORK * of_head * (1 if of_head > ALIKE else heads) + 4 * processors + SPARE
        ints = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._copied.synchronize()  # the last plan's copy, which reads the buffer
        if len(self._pinned) < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        counts = torch.tensor(lengths, dtype=torch.int32), rows, len(lengths), heads, heads
        shape = (*counts, 1, False, wide, wide, False, -1)
        info = module.plan(self._floats, ints, self._pinned, starts, starts, *shape)
        self._copied.record()
        (placed,) = upload(self.device, starts.numpy())
        return Plan(heads, dim, module, ints, info, placed)

    def attend(self, qkv: torch.Tensor, plan: Plan, angles: Angles | None) -> torch.Tensor:
        q, k, v = cuda_encoder.spread(qkv, plan.heads, angles).unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan.module.ragged_run(
            self._floats,
            plan.ints,
            plan.info,
            q,
            k,
            v,
            plan.starts,
            plan.starts,
            out,
            None,  # no sums
            MaskMode.NON_CAUSAL.value,
            TensorLayout["NHD"].value,
            -1,  # no window
            True,  # programmatic dependent launch
            *[None] * 6,  # masks, slopes, items
            0.0,  # no soft cap
            1.0 / math.sqrt(plan.dim),
            1.0,
            1e4,
            0,
        )
        return cuda_encoder.join(out, plan.dim)

    def norm(self, x: torch.Tensor, norm: Norm, added: torch.Tensor | None = None) -> torch.Tensor:
        return cuda_encoder.norm(x, norm, added)

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Named by torch for its own layers, and the only way to cuBLASLt's GELU."""
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
