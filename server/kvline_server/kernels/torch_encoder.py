"""Attention of encoders in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvline_server.kernels.encoder import Encoder

Plan = list[tuple[int, int]]  # sequences that follow each other: how many, and rows of each


class TorchEncoder(Encoder):
    def plan(self, lengths: Sequence[int]) -> Plan:
        """Those of one length are computed at once: an image has many windows."""
        return [(len(list(same)), length) for length, same in itertools.groupby(lengths)]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        start = 0
        for count, length in plan:
            end = start + count * length
            q, k, v, into = (
                each[start:end].view(count, length, *each.shape[1:]).transpose(1, 2)
                for each in (queries, keys, values, out)
            )
            # [sequences, heads, rows, dim]; on a CPU by a kernel that keeps no scores.
            into.copy_(scaled_dot_product_attention(q, k, v))
            start = end
        return out
