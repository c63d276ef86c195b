"""The tower of Qwen2.5-VL: RMS norms, a gated MLP, and attention within windows in most layers.

Tokens are brought to an order in which those of a window follow each other, and back at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvline_server.images.processor import Grid
from kvline_server.kernels.encoder import Angles
from kvline_server.kernels.interface import Kernels
from kvline_server.model.linear import Tensors
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.layers import Layer, Merger, Mlp
from kvline_server.model.vision.tower import Tower, Work, angles, plan
from kvline_server.model.vision.weights import embedding, found, linear, rms_norm


class Qwen25(Tower):
    def __init__(self, tensors: Tensors, config: VisionConfig) -> None:
        self.config = c = config
        at, wide = found(tensors, c), c.hidden * c.merge**2
        self.patches = embedding(tensors, f"{at}patch_embed.proj", c, bias=False)
        self.layers = [_layer(tensors, c, f"{at}blocks.{n}.") for n in range(c.layers)]
        self.merger = Merger(
            norm=rms_norm(tensors, f"{at}merger.ln_q", c.hidden, c.eps),
            joined=False,
            up=linear(tensors, [f"{at}merger.mlp.0"], wide, wide),
            down=linear(tensors, [f"{at}merger.mlp.2"], c.out, wide),
        )

    def prepare(self, kernels: Kernels, x: torch.Tensor, grids: Sequence[Grid]) -> Work:
        unit, start = self.config.merge**2, 0
        orders: list[torch.Tensor] = []
        lengths: list[int] = []
        for grid in grids:
            order, tokens = windows(grid, self.config.window)
            orders.append(order + start)
            lengths += [each * unit for each in tokens]
            start += grid.tokens
        (order,) = kernels.upload(torch.cat(orders).numpy())
        turns = angles(kernels, self.config, grids)

        def ordered(rows: torch.Tensor) -> torch.Tensor:
            """[patches, ...]"""
            by_token = rows.view(-1, unit, rows.shape[1])
            return by_token[order].flatten(0, 1)

        return Work(
            x=ordered(x),
            plan=plan(kernels, self.config, [grid.patches for grid in grids]),
            angles=Angles(ordered(turns.cos), ordered(turns.sin)),
            windows=plan(kernels, self.config, lengths),
            order=order,
        )

    def merge(self, kernels: Kernels, work: Work, rows: torch.Tensor) -> None:
        assert work.order is not None
        made = torch.empty_like(rows)
        self.merger.run(kernels, work.x, self.config.merge**2, made)
        rows[work.order] = made


def windows(grid: Grid, side: int) -> tuple[torch.Tensor, list[int]]:
    """An image's tokens, window by window, those at its right and lower edges smaller than `side` x
    `side`; and how many each window has. -> int64 [tokens], on the host"""
    wide = grid.token_columns
    rows, columns = torch.arange(grid.token_rows) // side, torch.arange(wide) // side
    window = rows.unsqueeze(1) * -(-wide // side) + columns  # that a token is in
    return window.flatten().argsort(stable=True), window.flatten().bincount().tolist()


def _layer(tensors: Tensors, c: VisionConfig, at: str) -> Layer:
    up = [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]
    return Layer(
        before=rms_norm(tensors, f"{at}norm1", c.hidden, c.eps),
        qkv=linear(tensors, [f"{at}attn.qkv"], 3 * c.hidden, c.hidden),
        out=linear(tensors, [f"{at}attn.proj"], c.hidden, c.hidden),
        between=rms_norm(tensors, f"{at}norm2", c.hidden, c.eps),
        mlp=Mlp(
            up=linear(tensors, up, c.intermediate, c.hidden),
            down=linear(tensors, [f"{at}mlp.down_proj"], c.hidden, c.intermediate),
            gated=True,
        ),
    )
