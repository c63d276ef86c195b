"""A mixture of experts in plain torch: the CPU's, the reference for the tests, and for GPUs without
kernels for it. Nothing of it can be captured in a graph: the host reads how many rows each has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from kvline_server.kernels.experts import Experts, ExpertWeight, Given, Layer, Routing
from kvline_server.kernels.mxfp4 import Mxfp4Weight, PackedMxfp4
from kvline_server.kernels.routing import Played
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.tuning import Choices

ROWS = 512  # of one expert at a time: what a step takes is bounded however unequal the routing is
LEAST = 1e-20  # added to a sum of scores that others are divided by
AT_ONCE, ON_GPU = 1 << 20, 1 << 24  # numbers of 4 bits that are dequantised at a time


class TorchExperts(Experts):
    dequantises = True

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
            _routes(logits, layer, routing, given.played),
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


def _routes(logits: torch.Tensor, layer: Layer, routing: Routing, how: Played) -> Routes:
    """By the scores that the routing has; what is played, no bias changes."""
    if routing.scores == "softmax":
        return route(logits, routing.chosen, routing.renormalise)
    scores = logits.float().sigmoid()
    choice = scores
    if layer.choice_bias is not None and how is Played.NOTHING:
        choice = scores + layer.choice_bias
    ids = choice.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights /= weights.sum(dim=-1, keepdim=True) + LEAST
    return Routes(ids, weights * routing.scale)


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
        inputs, outputs = _of(layer.gate_up, expert, width), _of(layer.down, expert, hidden)
        for at in range(0, len(some), ROWS):
            pair = some[at : at + ROWS]
            row = pair // routes.ids.shape[1]
            both = _linear(x[row], inputs, _bias(layer.gate_up_bias, expert))
            made = _linear(activate(both), outputs, _bias(layer.down_bias, expert))
            out.index_add_(0, row, made * weights[pair])
    return out


def _of(weight: ExpertWeight, expert: int, rows: int) -> torch.Tensor | Mxfp4Weight:
    """An expert's, which has so many rows."""
    assert not isinstance(weight, PackedMxfp4)  # which is a GPU's
    return weight[expert * rows : (expert + 1) * rows]


def _bias(every: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if every is None else every[expert]


def _linear(
    x: torch.Tensor, weight: torch.Tensor | Mxfp4Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + b; some outputs after the other where the weight is in 4 bits, so that a step takes
    no more memory for it, and on a CPU what is dequantised is used while it is in a cache."""
    if isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    step = max(1, (ON_GPU if x.is_cuda else AT_ONCE) // weight.shape[1])
    made = [
        linear(x, weight[at : at + step].dequantised(x.dtype), _some(bias, at, step))
        for at in range(0, len(weight), step)
    ]
    return torch.cat(made, dim=1) if len(made) > 1 else made[0]


def _some(bias: torch.Tensor | None, at: int, count: int) -> torch.Tensor | None:
    return None if bias is None else bias[at : at + count]
