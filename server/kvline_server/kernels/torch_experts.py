"""A mixture of experts in plain torch: the CPU's, the reference for the tests, and for GPUs without
kernels for it. Nothing of it can be captured in a graph: the host reads how many rows each has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from kvline_server.kernels.experts import Experts, ExpertWeight, Given, Layer, Routing
from kvline_server.kernels.mxfp4 import PackedMxfp4
from kvline_server.kernels.routing import Played
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.tuning import Choices

ROWS = 512  # of one expert at a time: what a step takes is bounded however unequal the routing is


class TorchExperts(Experts):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def run(
        self, x: torch.Tensor, logits: torch.Tensor, layer: Layer, routing: Routing, given: Given
    ) -> torch.Tensor:
        assert given.on_device is None  # nothing of it can be captured
        rows = given.rows
        logits = played(logits[:rows], routing.chosen, given.played)
        made = run(
            x[:rows],
            route(logits, routing.chosen, routing.renormalise),
            layer,
            lambda both: self.rows.activate_and_mul(both, routing.activation),
        )
        return made if rows == len(x) else pad(made, (0, 0, 0, len(x) - rows))

    def tune(
        self, layers: list[Layer], routing: Routing, rows: list[int], known: Choices | None
    ) -> None:
        return


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row."""

    ids: torch.Tensor  # int64 [rows, chosen]
    weights: torch.Tensor  # float32 [rows, chosen]


def route(logits: torch.Tensor, chosen: int, renormalise: bool) -> Routes:
    """The `chosen` largest of a softmax over all experts. [rows, experts]"""
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(chosen, dim=-1)
    return Routes(ids, weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights)


def played(logits: torch.Tensor, chosen: int, how: Played) -> torch.Tensor:
    """Logits of which the `chosen` largest are as played. [rows, experts] -> the same"""
    if how is Played.NOTHING:
        return logits
    rows, experts = logits.shape
    first = torch.arange(rows, device=logits.device) * (chosen if how is Played.EVEN else 0)
    expert = torch.arange(experts, device=logits.device)
    return -((expert - first.unsqueeze(1)) % experts).float()


def run(
    x: torch.Tensor,
    routes: Routes,
    layer: Layer,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As Experts.run, of all rows. One expert after the other, in their order on every rank."""
    hidden, out = x.shape[1], torch.zeros_like(x)
    pairs = routes.ids.flatten()
    order = pairs.argsort(stable=True)
    counts = pairs.bincount(minlength=layer.experts).tolist()
    weights = routes.weights.flatten().to(x.dtype).unsqueeze(1)
    width = len(layer.gate_up) // layer.experts
    for expert, some in enumerate(torch.split(order, counts)):
        if not len(some):  # what is in 4 bits is dequantised for rows alone
            continue
        first = _of(layer.gate_up, expert, width, x.dtype)
        last = _of(layer.down, expert, hidden, x.dtype)
        for at in range(0, len(some), ROWS):
            pair = some[at : at + ROWS]
            row = pair // routes.ids.shape[1]
            both = linear(x[row], first, _bias(layer.gate_up_bias, expert))
            made = linear(activate(both), last, _bias(layer.down_bias, expert))
            out.index_add_(0, row, made * weights[pair])
    return out


def _of(weight: ExpertWeight, expert: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """An expert's, which has so many rows."""
    assert not isinstance(weight, PackedMxfp4)  # which is a GPU's
    own = weight[expert * rows : (expert + 1) * rows]
    return own if isinstance(own, torch.Tensor) else own.dequantised(dtype)


def _bias(every: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if every is None else every[expert]
