"""A step's operations on a CUDA GPU: FlashInfer's attention and norms, our Triton kernels, GEMMs.

Only this module, flashinfer_attention.py and bf16_linear.py import flashinfer. Decodes run its fa2
kernels on tensor cores, prompt chunks its fa3 kernels: on Hopper fa3 is several times slower for
one-token queries, and faster for chunks. With an fp8 KV cache decodes run our own, and chunks a
copy's fa3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer import norm as norms
from flashinfer import sampling
from torch.nn import functional

from kvline_server.kernels import (
    cubins,
    cuda_attention,
    cuda_rows,
    cuda_write,
)
from kvline_server.kernels.cuda_attention import Fp8Decodes
from kvline_server.kernels.cuda_experts import ExpertGemms
from kvline_server.kernels.flashinfer_attention import (
    DEPTH,
    FLOAT_BYTES,
    Fp8Chunks,
    PagedAttention,
    chunk_floats,
)
from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.gemm import Gemms, replay_time
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.interface import (
    NO_TOKEN,
    PLAIN,
    AttentionOptions,
    Fetch,
    Given,
    Heads,
    Kernels,
    PageTables,
    PartScores,
    Routing,
    RowScores,
    SlotMapping,
)
from kvline_server.kernels.layout import GREEDY, Draws, Layout
from kvline_server.kernels.projection import (
    STORE,
    Epilogue,
    Gate,
    Join,
    Norm,
    Operand,
    Projection,
)
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

HEAD_TILE = 16  # rows
FEW_ROWS = 128  # whose all-reduce adds to the residual too, where the group has a kernel


@dataclass(frozen=True, slots=True)
class Plan:
    decodes: int  # decoding sequences, one row each
    rows: int
    decode: Any  # of the class that runs decodes, or None; so is the next
    prefill: Any


class _PinnedCopies:
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


class FlashInferKernels(Kernels):
    depth = DEPTH
    tunes = True
    keeps_fp8 = True
    tiles_context = True

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        group: Group = ALONE,
        cache: torch.dtype = torch.bfloat16,
    ) -> None:
        """For shapes that cuda_write.check lets pass; `cache` is the KV cache's dtype. Raises
        RuntimeError or ImportError where the kernels are missing."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.bfloat16
        self.group = group
        self.build = cubins.identity()
        shape, fp8 = (heads, kv_heads, dim), cache != self.dtype
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = max(FLOAT_BYTES, chunk_floats(shape, processors) if fp8 else 0)
        floats = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._decode: PagedAttention | Fp8Decodes
        self._prefill: PagedAttention | Fp8Chunks
        if fp8 and cuda_attention.fits(heads, kv_heads):
            self._decode = Fp8Decodes(*shape, processors)
        else:
            self._decode = PagedAttention(shape, self.dtype, cache, "fa2", False, floats)
        if fp8:
            self._prefill = Fp8Chunks(shape, self.dtype, cache, floats)
        else:
            self._prefill = PagedAttention(shape, self.dtype, cache, "fa3", True, floats)
        self._gemms = Gemms(self.device)
        self._experts = ExpertGemms(self._gemms.choices, self.activate_and_mul)

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // 16) * 16
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        packed = host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        uploaded = host.to(self.device, non_blocking=True)
        return [
            uploaded[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return _PinnedCopies(tensors)

    def pack(self, weight: Weight) -> Weight:
        packed: Weight = self._gemms.of(weight).pack(weight)
        return packed

    def project(self, x: Operand, projection: Projection, then: Epilogue = STORE) -> Operand:
        if isinstance(then, Gate) and projection.bias is None and then.activation == "silu":
            return self._gated(x, projection)
        if isinstance(then, Join) and self._added(x, projection, then):
            return Operand(then.residual, then.before)
        return super().project(x, projection, then)

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = projection.weight
        linears = self._gemms.of(weight)
        if x.norm is not None and linears.takes_row(x.rows, weight):
            return linears.row(x, weight, projection.bias, out)
        if not (x.settled or (x.gated and linears.gates)):
            x = Operand(self.settle(x))
        return linears.rows(x, weight, projection.bias, out)

    def _gated(self, x: Operand, projection: Projection) -> Operand:
        linears = self._gemms.of(projection.weight)
        if x.norm is not None and linears.takes_row(x.rows, projection.weight):
            return Operand(linears.row(x, projection.weight, gated=True))
        made = self.linear(x, projection)
        if linears.gates and len(made) > 1:  # so does what reads it, where all are of one format
            return Operand(made, gated=True)
        return Operand(self.activate_and_mul(made, "silu"))

    def _added(self, x: Operand, projection: Projection, then: Join) -> bool:
        """Adds the sum over ranks to the residual where a kernel does that in passing, and the next
        one norms; else nothing is done."""
        if then.after is not None or then.before is None:
            return False
        weight, bias = projection.weight, projection.bias
        linears = self._gemms.of(weight)
        one = x.settled and linears.takes_row(x.rows, weight)
        if self.group.ranks == 1:
            if one:
                linears.row(x, weight, bias, then.residual, added=True)
            return one
        if len(x) > FEW_ROWS:
            return False
        out = self.group.buffer(len(x), len(projection))
        made = linears.row(x, weight, bias, out) if one else self.linear(x, projection, out)
        self.group.all_reduce_add(made, then.residual)
        return True

    def experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        routing: Routing,
        rows: Given,
    ) -> torch.Tensor:
        out = self.group.buffer(*x.shape)
        return self._experts.run(
            x, logits, (gate_up, down), routing, rows, out, played=self.routing
        )

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        out: torch.Tensor = norms.rmsnorm(x, norm.weight, eps=norm.eps)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        norms.fused_add_rmsnorm(x, residual, norm.weight, eps=norm.eps)
        return x

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        assert activation == "silu"  # library.py has no other
        out: torch.Tensor = flashinfer.silu_and_mul(x)
        return out

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """float32 [positions, dim]: all cosines, then all sines"""
        return torch.cat((cos, sin), dim=-1).to(self.device)

    def plan(self, layout: Layout) -> Plan:
        last_page = (layout.lengths - 1) % PAGE_SIZE + 1
        kinds = slice(0, layout.decodes), slice(layout.decodes, layout.sequences)
        arrays = []
        for own in kinds:
            ends = slice(own.start, own.stop + 1)
            rows, pages = layout.row_starts[ends], layout.page_starts[ends]
            used = layout.pages[pages[0] : pages[-1]]
            arrays.append((rows - rows[0], pages - pages[0], used, last_page[own]))
        device = self.upload(*arrays[0], *arrays[1])
        decode, prefill = (
            PageTables(rows, pages, layout.lengths[own], *device[at : at + 4])
            for own, (rows, pages, *_), at in zip(kinds, arrays, (0, 4), strict=True)
        )
        return Plan(
            layout.decodes,
            layout.rows,
            self._decode.plan(decode) if len(decode.lengths) else None,
            self._prefill.plan(prefill) if len(prefill.lengths) else None,
        )

    def plan_in_place(self, tables: PageTables) -> Plan:
        rows = len(tables.lengths)
        return Plan(rows, rows, self._decode.plan(tables, in_place=True), None)

    def write(self, heads: Heads, rope: torch.Tensor, mapping: SlotMapping, cache: KVLayer) -> None:
        cuda_write.write(heads, rope, mapping, cache)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: Plan,
        out: torch.Tensor | None = None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        scale = (options.scale or 1.0 / math.sqrt(dim)) * cache.scales.keys
        flat = q.new_empty((rows, heads * dim)) if out is None else out
        made = flat.view(rows, heads, dim)
        if plan.decode is not None:
            self._decode.run(q[: plan.decodes], cache, plan.decode, scale, made[: plan.decodes])
        if plan.prefill is not None:
            chunk = slice(plan.decodes, plan.rows)
            self._prefill.run(q[chunk], cache, plan.prefill, scale, made[chunk])
        return flat if cache.scales.values == 1.0 else flat.mul_(cache.scales.values)

    def tune(
        self, weights: list[list[Weight]], rows: list[int], known: Choices | None
    ) -> Choices | None:
        if known is None:
            self._gemms.tune(weights, rows)
        else:
            self._gemms.take(weights, known)
        return self._gemms.choices

    def tune_experts(
        self,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        routing: Routing,
        rows: list[int],
        known: Choices | None,
    ) -> None:
        self._experts.tune(layers, routing, rows, known, replay_time)

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Row counts beyond a tile are padded to whole ones: cuBLAS looks for a kernel at each row
        count that it has not met, on the host."""
        rows = len(hidden)
        more = -rows % HEAD_TILE if rows > HEAD_TILE else 0
        return functional.linear(functional.pad(hidden, (0, 0, 0, more)), head)[:rows]

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        values, ranks, normalisers = cuda_rows.score(logits, targets)
        ids, best = _most_likely(logits, top)
        return RowScores(values, ranks, ids, best.sub_(normalisers.unsqueeze(1)))

    def part_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> PartScores:
        _, ranks, normalisers = cuda_rows.score(logits, chosen)
        return PartScores(normalisers, ranks.sub_(1), *_most_likely(logits, top))

    def best(self, logits: torch.Tensor, draws: Draws, first: int) -> torch.Tensor:
        temperatures, keys = self._drawn_by(draws)
        return cuda_rows.draw(logits, keys, temperatures, first)

    def _drawn_by(self, draws: Draws) -> list[torch.Tensor]:
        """Temperatures, 0 of greedy rows, and keys, on the device. float32, int64 [rows]"""
        greedy = draws.temperatures < GREEDY
        scaled = np.where(greedy, np.float32(0.0), draws.temperatures)
        return self.upload(scaled, draws.keys.view(np.int64))

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        temperatures, keys = self._drawn_by(draws)
        if not draws.filtered.any():
            return cuda_rows.draw(logits, keys, temperatures)
        best = temperatures == 0.0
        weights, not_finite = self._filtered(logits, temperatures.masked_fill(best, 1.0), draws)
        chosen = cuda_rows.draw(weights, keys).masked_fill_(not_finite, NO_TOKEN)
        if (draws.temperatures < GREEDY).any():
            chosen = torch.where(best, cuda_rows.draw(logits, keys, temperatures), chosen)
        return chosen

    def _filtered(
        self, logits: torch.Tensor, temperatures: torch.Tensor, draws: Draws
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities after top-k, then top-p of the rest, then min-p, and a mask of rows whose
        logits are not finite. -> float32 [rows, vocabulary], bool [rows]"""
        weights: torch.Tensor = sampling.softmax(logits.float(), temperature=temperatures)
        # One NaN makes a whole row NaN, and the filters' searches may not end on NaN.
        not_finite = weights[:, 0].isnan()
        vocabulary = logits.shape[1]
        weights.masked_fill_(not_finite.unsqueeze(1), 1.0 / vocabulary)
        if (draws.top_k > 0).any():
            count = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocabulary), vocabulary)
            weights = sampling.top_k_renorm_probs(weights, self.upload(count.astype(np.int32))[0])
        if (draws.top_p < 1.0).any():
            weights = sampling.top_p_renorm_probs(weights, self.upload(draws.top_p)[0])
        if (draws.min_p > 0.0).any():
            threshold = self.upload(draws.min_p)[0] * weights.amax(dim=-1)
            weights = weights.masked_fill_(weights < threshold.unsqueeze(1), 0.0)
        return weights, not_finite


def _most_likely(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits, best first. -> int32, float32 [rows, top]"""
    rows, tokens = logits.shape
    if not top:
        none = torch.empty((rows, 0), device=logits.device)
        return none.to(torch.int32), none
    best, ids = flashinfer.top_k(logits, min(top, tokens), sorted=True)
    return ids.to(torch.int32), best.float()
