"""Encoders on a GPU: FlashInfer's fa3 over sequences of any lengths, our Triton kernels around it,
and GELU within a GEMM by cuBLASLt.

Source of the calls: flashinfer.prefill, version 0.6.18. A plan is copied from pinned memory
asynchronously, so its buffer is not rewritten before that copy is done; a pass has up to two plans.
Beyond the end of a sequence fa3 multiplies the next one's values by 0.
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

PLANS = 2  # of a pass: whole images, and windows


class Staging:
    """Pinned memory, and when what was copied from it last has arrived."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        """Waits for the last copy."""
        self.copied.synchronize()
        if len(self._pinned) < nbytes:
            self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned


@dataclass(frozen=True, slots=True)
class Plan:
    heads: int
    dim: int
    module: Any
    ints: torch.Tensor  # on the device
    info: Any
    starts: torch.Tensor  # int32 [sequences + 1], on the device


class GpuEncoder(Encoder):
    keeps_memory = True

    def __init__(self, device: torch.device, dim: int = 0) -> None:
        """`dim`: the head size of a tower that is to run; 0: none. Raises RuntimeError or
        ImportError where its kernels are missing."""
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._pool: torch.cuda.MemPool | None = None
        self._floats = torch.empty(16, dtype=torch.uint8, device=device)  # fa3 has none
        self._stagings, self._turn = [Staging() for _ in range(PLANS)], 0
        if dim:
            _module(cuda_encoder.padded(dim))

    def memory(self) -> AbstractContextManager[object]:
        """Segments of a pool are neither freed by empty_cache() nor used outside of it: what the
        stress took of a tower cannot become KV cache."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool, self.device)

    def plan(self, lengths: Sequence[int], heads: int, dim: int) -> Plan:
        wide, rows = cuda_encoder.padded(dim), sum(lengths)
        module, starts = _module(wide), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        size = cuda_encoder.workspace(rows, len(lengths), heads, dim, self.processors)
        ints = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._turn = (self._turn + 1) % PLANS
        staging = self._stagings[self._turn]
        counts = torch.tensor(lengths, dtype=torch.int32), rows, len(lengths), heads, heads
        shape = (*counts, 1, False, wide, wide, False, -1)
        info = module.plan(self._floats, ints, staging.of(size), starts, starts, *shape)
        staging.copied.record()
        (placed,) = upload(self.device, starts.numpy())
        return Plan(heads, dim, module, ints, info, placed)

    def attend(self, qkv: torch.Tensor, plan: Plan, angles: Angles | None) -> torch.Tensor:
        q, k, v = cuda_encoder.pad_heads(qkv, plan.heads, angles).unbind(1)
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
        return cuda_encoder.unpad_heads(out, plan.dim)

    def norm(self, x: torch.Tensor, norm: Norm, added: torch.Tensor | None = None) -> torch.Tensor:
        return cuda_encoder.norm(x, norm, added)

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Named by torch for its own layers, and the only way to cuBLASLt's GELU."""
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def _module(wide: int) -> Any:
    kinds, none = (*[torch.bfloat16] * 3, torch.int32), PosEncodingMode["NONE"].value
    return get_batch_prefill_module("fa3", *kinds, wide, wide, none, False, False, False)
