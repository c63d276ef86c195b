"""The tower of Qwen3-VL and Qwen3.5: positions twice, as rotary embeddings and by a table that is
stretched to each image; and deepstack, where layers on the way are merged too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch.nn import functional

from kvline_server.images.processor import Grid
from kvline_server.kernels.interface import Kernels
from kvline_server.model.linear import Tensors
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.layers import Layer, Merger, Mlp
from kvline_server.model.vision.patches import ordered
from kvline_server.model.vision.tower import Tower, Work, angles, plan
from kvline_server.model.vision.weights import embedding, found, layer_norm, linear, vector


class Qwen3(Tower):
    def __init__(self, tensors: Tensors, config: VisionConfig) -> None:
        self.config = c = config
        at = found(tensors, c)
        self.patches = embedding(tensors, f"{at}patch_embed.proj", c)
        table = [vector(f"{at}pos_embed.weight", c.positions**2)]
        self.positions = tensors.get(table, c.hidden)  # [table's places, hidden]
        self.layers = [_layer(tensors, c, f"{at}blocks.{n}.") for n in range(c.layers)]
        self.merger = _merger(tensors, c, f"{at}merger.", joined=False)
        self.deepstack = [
            _merger(tensors, c, f"{at}deepstack_merger_list.{n}.", joined=True)
            for n in range(len(c.deepstack))
        ]

    def prepare(self, kernels: Kernels, x: torch.Tensor, grids: Sequence[Grid]) -> Work:
        starts: dict[Grid, list[int]] = {}
        for grid, end in zip(grids, accumulate(each.patches for each in grids), strict=True):
            starts.setdefault(grid, []).append(end - grid.patches)
        for grid, every_start in starts.items():
            made = self._places(grid).to(x.dtype)
            for start in every_start:
                x[start : start + grid.patches] += made
        lengths = [grid.patches for grid in grids]
        every = plan(kernels, self.config, lengths)
        return Work(x, every, angles(kernels, self.config, grids))

    def _places(self, grid: Grid) -> torch.Tensor:
        """The table, stretched to the image so that their corners are the same. float32 [patches,
        hidden]"""
        side = self.config.positions
        # Channels last, which a GPU stretches twenty times as fast.
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        made = functional.interpolate(
            table, (grid.rows, grid.columns), mode="bilinear", align_corners=True
        )
        return ordered(grid, made[0].permute(1, 2, 0))

    def merge(self, kernels: Kernels, work: Work, rows: torch.Tensor) -> None:
        self.merger.run(kernels, work.x, self.config.merge**2, rows[:, : self.config.out])


def _layer(tensors: Tensors, c: VisionConfig, at: str) -> Layer:
    norm = partial(layer_norm, tensors, width=c.hidden, eps=c.eps)
    return Layer(
        before=norm(f"{at}norm1"),
        qkv=linear(tensors, [f"{at}attn.qkv"], 3 * c.hidden, c.hidden),
        out=linear(tensors, [f"{at}attn.proj"], c.hidden, c.hidden),
        between=norm(f"{at}norm2"),
        mlp=Mlp(
            up=linear(tensors, [f"{at}mlp.linear_fc1"], c.intermediate, c.hidden),
            down=linear(tensors, [f"{at}mlp.linear_fc2"], c.hidden, c.intermediate),
        ),
    )


def _merger(tensors: Tensors, c: VisionConfig, at: str, joined: bool) -> Merger:
    wide = c.hidden * c.merge**2
    return Merger(
        norm=layer_norm(tensors, f"{at}norm", wide if joined else c.hidden, c.eps),
        joined=joined,
        up=linear(tensors, [f"{at}linear_fc1"], wide, wide),
        down=linear(tensors, [f"{at}linear_fc2"], c.out, wide),
    )
