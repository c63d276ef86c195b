"""Attention of encoders on a GPU, by torch's kernel for sequences of any lengths: FlashInfer has
none for heads of 72 and 80."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvline_server.kernels.encoder import Encoder


@dataclass(frozen=True, slots=True)
class Plan:
    starts: torch.Tensor  # int32 [sequences + 1]
    longest: int


class GpuEncoder(Encoder):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None

    def memory(self) -> AbstractContextManager[object]:
        """Segments of a pool are neither freed by empty_cache() nor used outside of it: what the
        stress took of a tower cannot become KV cache."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool, self.device)

    def plan(self, lengths: Sequence[int]) -> Plan:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        return Plan(starts, max(lengths))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        # Here, so that a model without images starts as it did.
        from torch.nn.attention.varlen import varlen_attn

        ends, most = (plan.starts, plan.starts), (plan.longest, plan.longest)
        made = varlen_attn(queries, keys, values, *ends, *most)
        assert isinstance(made, torch.Tensor)  # nothing else was asked for
        return made
