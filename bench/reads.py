"""Upper bound on throughput by KV cache reads: every output token attends to all tokens before
it, in each layer. Arithmetic on lengths; needs no GPU. Of a mixture of experts, also the time of
its weights' reads."""

from __future__ import annotations

import offline
import peers
import torch
from record import table
from shapes import SHAPES
from workloads import WORKLOADS

from kvline_server.model import hybrid
from kvline_server.model.config import Experts, ModelConfig
from kvline_server.model.decoder import cache_groups, state_shapes
from kvline_server.model.sequence import Kind

BANDWIDTH = 4.2e12  # bytes per second that a copy reaches on an H200
KINDS = ("nano", "r512", "long")


def run() -> None:
    rows = []
    for name in offline.models():
        shape = SHAPES[name]
        for kind in KINDS:
            workload = WORKLOADS[kind]
            requests = workload.make(shape.vocabulary)
            # The first token comes with the prompt; token n reads the prompt and n - 1 outputs.
            tokens = sum(o * len(p) + o * (o - 1) // 2 for p, o in requests)
            each = cache_groups(shape, 1, torch.bfloat16)[0].shape.bytes_per_token
            seconds = tokens * each / BANDWIDTH
            output = sum(o for _, o in requests)
            figures = [f"{output}", f"{tokens / 1e6:.1f}", f"{seconds * BANDWIDTH / 1e12:.2f}"]
            rows.append([name, kind, *figures, f"{seconds:.2f}", f"{output / seconds:.0f}"])
    head = ["model", "workload", "output tokens", "M tokens read", "TB", "seconds", "output tok/s"]
    table(f"Reading the cache alone at {BANDWIDTH / 1e12:.1f} TB/s", head, rows)


def experts_ms(shape: ModelConfig, many: Experts, at_once: int) -> float:
    """Milliseconds of a step that reads what its tokens need of the experts' weights, and does
    nothing else; random routers send a token to each expert alike."""
    met = many.count * (1 - (1 - many.chosen / many.count) ** at_once)
    elements = shape.layers * met * 3 * shape.hidden * shape.intermediate / peers.GPUS
    # In 4 bits with a byte for each 32.
    size = 17 / 32 if many.mxfp4 else torch.bfloat16.itemsize
    return 1e3 * elements * size / BANDWIDTH


def decode_ms(shape: ModelConfig, many: Experts, at_once: int, context: int) -> float:
    """Milliseconds of a step that reads what so many requests with a context of so many tokens need
    of the experts, the projections of attention, the LM head and the KV cache, and does nothing
    else."""
    heads = 2 * shape.heads + 2 * shape.kv_heads  # queries and output, keys and values
    elements = shape.layers * shape.hidden * heads * shape.head_dim
    elements += shape.vocabulary * shape.hidden
    held = sum(min(context, window or context) for window in shape.every_window)
    elements += at_once * held * 2 * shape.kv_heads * shape.head_dim
    others = elements / peers.GPUS * torch.bfloat16.itemsize / BANDWIDTH
    return experts_ms(shape, many, at_once) + 1e3 * others


def hybrid_ms(shape: ModelConfig, at_once: int, context: int) -> float:
    """As decode_ms, of a model with recurrent layers: their projections too, and the states of so
    many requests, read and written."""
    heads = (3 if shape.output_gate else 2) * shape.heads + 2 * shape.kv_heads
    matrices = 2 if shape.activation == "relu2" else 3  # of an MLP: there is no gate
    each = {
        Kind.RECURRENT: shape.hidden * _recurrent(shape),
        Kind.ATTENTION: shape.hidden * heads * shape.head_dim,
        Kind.MLP: matrices * shape.hidden * shape.intermediate,
        Kind.EXPERTS: 0,
    }
    elements = sum(each[block.kind] for block in shape.blocks) + shape.vocabulary * shape.hidden
    experts = 0.0
    if (many := shape.experts) is not None:
        assert matrices == 3 and not many.latent and not many.width, "as experts_ms has them"
        experts = experts_ms(shape, many, at_once)
        beside = many.count + (0 if many.shared is None else matrices * many.shared.width)
        elements += shape.layers * shape.hidden * beside
    kept = 2 * shape.kv_heads * shape.head_dim * len(shape.attentions)
    elements += at_once * context * kept
    each_state = (one.nbytes(torch.bfloat16, torch.float32) for one in state_shapes(shape))
    states = 2 * at_once * sum(each_state)
    others = (elements * torch.bfloat16.itemsize + states) / peers.GPUS / BANDWIDTH
    return experts + 1e3 * others


def _recurrent(shape: ModelConfig) -> int:
    """Columns of a recurrent layer's projections, in and out."""
    if isinstance(rule := shape.recurrent, hybrid.DeltaRule):
        return 2 * rule.keys + 3 * rule.values + 2 * rule.value_heads  # q, k, v, z, out; b, a
    assert isinstance(rule, hybrid.Mamba2)
    return 3 * rule.inner + 2 * rule.groups * rule.state_dim + rule.heads  # z, x, out; B, C; dt
