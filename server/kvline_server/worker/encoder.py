"""The encoder of images: its passes, and the cache of what they made.

A row of the cache is what stands in the place of a token's embedding, behind those of the
vocabulary, so that a step names both by one number; and what is added behind the text model's first
layers, where its family has that. The cache has its bytes for good.
"""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.images.processor import Normalisation
from kvline_server.memory import device_errors
from kvline_server.model.decoder import Decoder
from kvline_server.model.vision.tower import Pass, Tower


class Encoder:
    def __init__(self, tower: Tower, decoder: Decoder, normalisation: Normalisation) -> None:
        self.tower, self.kernels = tower, decoder.kernels
        self.normalisation = normalisation
        config, weights = decoder.config, decoder.weights
        self.embeddings = weights.embedding[config.vocabulary :]  # [rows, hidden]
        self.deepstack = decoder.deepstack[:, 1:]  # [layers, rows, hidden]
        # Tokens times layers of a slice, as large passes have shown; before them any.
        self.slice = 1 << 31
        self._pass: Pass | None = None
        self._rows = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def begin(self, images: list[np.ndarray], rows: np.ndarray) -> None:
        """uint8 [height, width, 3] of each, and the rows of their tokens, in their order. Raises as
        Worker.launch does."""
        with device_errors.translated("encode"):
            (self._rows,) = self.kernels.upload(rows)
            own = [torch.tensor(each, device=self.kernels.device) for each in images]
            self._pass = self.tower.begin(self.kernels, own, self.normalisation)

    @torch.inference_mode()
    def run(self, layers: int) -> bool:
        """Goes on by so many layers, or with 0 to the end. -> whether it is complete"""
        assert self._pass is not None, "begin is first"
        with device_errors.translated("encode"):
            if not self._pass.run(layers or self.tower.config.layers):
                return False
            hidden = self.embeddings.shape[1]
            own, *added = torch.split(self._pass.rows, hidden, dim=1)
            self.embeddings.index_copy_(0, self._rows, own)
            for into, each in zip(self.deepstack, added, strict=True):
                into.index_copy_(0, self._rows, each)
            self._pass = None
        return True
