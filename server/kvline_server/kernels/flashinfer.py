"""A step's operations on a CUDA GPU: FlashInfer's attention, norms and rope, torch's products.

The only importer of flashinfer. Decoding runs its fa2 kernels on tensor cores, prompts its fa3
kernels: on Hopper the fa3 wrapper is several times slower on one-token queries, and the faster one
on chunks (docs/performance.md). Every plan says dtype and causality by keyword: the defaults are
float16 and none.
"""

from __future__ import annotations

from dataclasses import dataclass

import flashinfer
import numpy as np
import torch
from flashinfer import norm, page, rope, sampling
from torch.nn import functional

from kvline_server.kernels import triton_rows
from kvline_server.kernels.interface import GREEDY, Draws, Fetch, KVLayer, RowScores
from kvline_server.kernels.layout import Layout
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.model.config import ModelConfig

WORKSPACE_BYTES = 128 << 20
BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a step's rows go; the wrappers hold the rest of their plans themselves."""

    decodes: int  # rows, and sequences, that decode
    rows: int
    positions: torch.Tensor  # int32 [rows]
    sequences: torch.Tensor  # int32 [rows], whose each row is
    page_starts: torch.Tensor  # int32 [sequences + 1]
    pages: torch.Tensor  # int32
    last_page: torch.Tensor  # int32 [sequences], tokens in each one's last page


class _Copies:
    """Copies into pinned memory, in order behind the step; the event says when they are there."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self.host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.done.record()

    def wait(self) -> list[np.ndarray]:
        self.done.synchronize()
        return [tensor.numpy() for tensor in self.host]


class FlashInferKernels:
    depth = 1

    def __init__(self, config: ModelConfig) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.bfloat16
        self.config = config
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty_like(workspace), "NHD", backend="fa3"
        )

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return _Copies(tensors)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out: torch.Tensor = norm.rmsnorm(x, weight, eps=eps)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm.fused_add_rmsnorm(x, residual, weight, eps=eps)
        return x, residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashinfer.silu_and_mul(x)
        return out

    def rope_table(self, inverse_frequencies: torch.Tensor, positions: int) -> torch.Tensor:
        """float32 [positions, dim]: all cosines, then all sines"""
        frequencies = inverse_frequencies.to(self.device)
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device=self.device), frequencies
        )
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def plan(self, layout: Layout) -> Plan:
        counts = np.diff(layout.row_starts)
        last_page = (layout.lengths - 1) % PAGE_SIZE + 1
        made = Plan(
            decodes=layout.decodes,
            rows=layout.rows,
            positions=self.tensor(layout.positions),
            sequences=self.tensor(np.repeat(np.arange(layout.sequences, dtype=np.int32), counts)),
            page_starts=self.tensor(layout.page_starts),
            pages=self.tensor(layout.pages),
            last_page=self.tensor(last_page),
        )
        if layout.decodes:
            self._plan_decode(layout, made, last_page)
        if layout.decodes < layout.sequences:
            self._plan_prefill(layout, made, last_page)
        return made

    def _plan_decode(self, layout: Layout, made: Plan, last_page: np.ndarray) -> None:
        count = layout.decodes
        c = self.config
        self._decode.plan(
            indptr=torch.from_numpy(layout.page_starts[: count + 1]),
            indices=made.pages[: int(layout.page_starts[count])],
            last_page_len=torch.from_numpy(last_page[:count]),
            num_qo_heads=c.heads,
            num_kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            page_size=PAGE_SIZE,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            non_blocking=True,
        )

    def _plan_prefill(self, layout: Layout, made: Plan, last_page: np.ndarray) -> None:
        first = layout.decodes
        c = self.config
        row_starts = layout.row_starts[first:] - layout.row_starts[first]
        page_starts = layout.page_starts[first:] - layout.page_starts[first]
        self._prefill.plan(
            qo_indptr=torch.from_numpy(row_starts),
            paged_kv_indptr=torch.from_numpy(page_starts),
            paged_kv_indices=made.pages[int(layout.page_starts[first]) :],
            paged_kv_last_page_len=torch.from_numpy(last_page[first:]),
            num_qo_heads=c.heads,
            num_kv_heads=c.kv_heads,
            head_dim_qk=c.head_dim,
            page_size=PAGE_SIZE,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            non_blocking=True,
            max_token_per_sequence=int(np.diff(row_starts).max()),
        )

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope_table: torch.Tensor,
        cache: KVLayer,
        plan: Plan,
    ) -> torch.Tensor:
        rope.apply_rope_with_cos_sin_cache_inplace(
            positions=plan.positions,
            query=q,
            key=k,
            head_size=self.config.head_dim,
            cos_sin_cache=rope_table,
            is_neox=True,
        )
        pair = (cache.keys, cache.values)
        page.append_paged_kv_cache(
            append_key=k,
            append_value=v,
            batch_indices=plan.sequences,
            positions=plan.positions,
            paged_kv_cache=pair,
            kv_indices=plan.pages,
            kv_indptr=plan.page_starts,
            kv_last_page_len=plan.last_page,
            kv_layout="NHD",
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decodes:
            self._decode.run(q[: plan.decodes], pair, out=out[: plan.decodes])
        if plan.decodes < plan.rows:
            self._prefill.run(q[plan.decodes :], pair, out=out[plan.decodes :])
        return out.view(plan.rows, -1)

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, head)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        values, ranks, normalisers = triton_rows.score(logits, targets)
        top = min(top, logits.shape[1])
        if not top:
            none = values.new_empty((len(values), 0))
            return RowScores(values, ranks, none.to(torch.int32), none)
        best, ids = flashinfer.top_k(logits, top, sorted=True)
        top_values = best.float() - normalisers.unsqueeze(1)
        return RowScores(values, ranks, ids.to(torch.int32), top_values)

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        greedy = draws.temperatures < GREEDY
        if greedy.all():
            return logits.argmax(dim=-1)
        temperatures = self.tensor(np.where(greedy, np.float32(1.0), draws.temperatures))
        uniforms = self.tensor(np.minimum(draws.uniforms, BELOW_ONE).astype(np.float32))
        filtered = (draws.top_k > 0) | (draws.top_p < 1.0) | (draws.min_p > 0.0)
        if filtered.any():
            chosen = triton_rows.draw(self._filtered(logits, temperatures, draws), uniforms)
        else:
            chosen = triton_rows.draw(logits, uniforms, temperatures)
        if greedy.any():
            chosen = torch.where(self.tensor(greedy), logits.argmax(dim=-1), chosen)
        return chosen

    def _filtered(
        self, logits: torch.Tensor, temperatures: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        """Probabilities after top-k, then top-p of the rest, then min-p."""
        weights: torch.Tensor = sampling.softmax(logits.float(), temperature=temperatures)
        vocabulary = logits.shape[1]
        if (draws.top_k > 0).any():
            count = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocabulary), vocabulary)
            weights = sampling.top_k_renorm_probs(weights, self.tensor(count.astype(np.int32)))
        if (draws.top_p < 1.0).any():
            weights = sampling.top_p_renorm_probs(weights, self.tensor(draws.top_p))
        if (draws.min_p > 0.0).any():
            least = self.tensor(draws.min_p) * weights.amax(dim=-1)
            weights = weights.masked_fill_(weights < least.unsqueeze(1), 0.0)
        return weights
