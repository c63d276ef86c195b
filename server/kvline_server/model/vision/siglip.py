"""SigLIP with the projector of Gemma 3: images of one size, of whose patches squares are averaged.

The files of its makers have `vision_model.` in the names, those that transformers saves have not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvline_server.images.processor import Grid
from kvline_server.kernels.interface import Kernels
from kvline_server.model.linear import Tensors
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.layers import Layer, Mlp
from kvline_server.model.vision.patches import ordered
from kvline_server.model.vision.tower import Tower, Work, plan
from kvline_server.model.vision.weights import (
    embedding,
    found,
    layer_norm,
    linear,
    rms_norm,
    vector,
)


class Siglip(Tower):
    def __init__(self, tensors: Tensors, config: VisionConfig) -> None:
        self.config = c = config
        at = found(tensors, c)
        self.patches = embedding(tensors, f"{at}embeddings.patch_embedding", c)
        table = [vector(f"{at}embeddings.position_embedding.weight", c.positions**2)]
        self.positions = tensors.get(table, c.hidden)  # [patches, hidden]
        self.layers = [_layer(tensors, c, f"{at}encoder.layers.{n}.") for n in range(c.layers)]
        self.last = layer_norm(tensors, f"{at}post_layernorm", c.hidden, c.eps)
        at = at[: at.index("vision_tower.")] + "multi_modal_projector."
        self.norm = rms_norm(tensors, f"{at}mm_soft_emb_norm", c.hidden, c.eps, offset=1.0)
        weight = [vector(f"{at}mm_input_projection_weight", c.hidden)]
        self.projection = tensors.get(weight, c.out)  # [hidden, out]: a linear's, transposed

    def prepare(self, kernels: Kernels, x: torch.Tensor, grids: Sequence[Grid]) -> Work:
        side = self.config.positions
        # All images are of one size.
        table = ordered(grids[0], self.positions.view(side, side, -1))
        x.view(len(grids), *table.shape).add_(table)
        return Work(x, plan(kernels, self.config, [grid.patches for grid in grids]))

    def merge(self, kernels: Kernels, work: Work, rows: torch.Tensor) -> None:
        means = kernels.encoder.norm(work.x, self.last).view(len(rows), -1, work.x.shape[1]).mean(1)
        torch.mm(kernels.encoder.norm(means, self.norm), self.projection, out=rows)


def _layer(tensors: Tensors, c: VisionConfig, at: str) -> Layer:
    qkv = [f"{at}self_attn.{kind}_proj" for kind in "qkv"]
    return Layer(
        before=layer_norm(tensors, f"{at}layer_norm1", c.hidden, c.eps),
        qkv=linear(tensors, qkv, c.hidden, c.hidden),
        out=linear(tensors, [f"{at}self_attn.out_proj"], c.hidden, c.hidden),
        between=layer_norm(tensors, f"{at}layer_norm2", c.hidden, c.eps),
        mlp=Mlp(
            up=linear(tensors, [f"{at}mlp.fc1"], c.intermediate, c.hidden),
            down=linear(tensors, [f"{at}mlp.fc2"], c.hidden, c.intermediate),
        ),
    )
