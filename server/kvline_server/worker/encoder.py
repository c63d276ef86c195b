"""The encoder of images: its passes, and the cache of what they made.

A row of the cache is what stands in the place of a token's embedding, behind those of the
vocabulary, so that a step names both by one number; and what is added behind the text model's first
layers, where its family has that. The cache has its bytes for good.

Each of several ranks has the whole tower and the whole cache. Of a pass it encodes its share, and
when all have, each writes the rows of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.images.digests import digest
from kvline_server.images.processor import Normalisation
from kvline_server.ipc.pixels import Place
from kvline_server.memory import device_errors
from kvline_server.model.decoder import Decoder
from kvline_server.model.vision.tower import Pass, Tower
from kvline_server.worker.division import divided

GATHERED_BYTES = 4 << 20  # of rows at once, of all ranks


class Image(Protocol):
    """As the encoder gets it: resized."""

    @property
    def tokens(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """Of its pixels and their shape."""

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """[height, width, 3]"""

    @property
    def place(self) -> Place | None:
        """Of the pixels, for other ranks. None: no other process has them."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """An Image of these."""

    tokens: int
    digest: bytes
    pixels: NDArray[np.uint8]
    place: Place | None = None


class Encoder:
    def __init__(self, tower: Tower, decoder: Decoder, normalisation: Normalisation) -> None:
        self.tower, self.kernels, self.group = tower, decoder.kernels, decoder.kernels.group
        self.normalisation = normalisation
        config, weights = decoder.config, decoder.weights
        self.embeddings = weights.embedding[config.vocabulary :]  # [rows, hidden]
        self.deepstack = decoder.deepstack[:, 1:]  # [layers, rows, hidden]
        self._pass: Pass | None = None  # of this rank's share, if it has one
        self._rows: list[torch.Tensor] = []  # of each rank's share
        self._left = 0  # layers

    @torch.inference_mode()
    def begin(self, images: Sequence[Image], rows: NDArray[np.int64]) -> list[int]:
        """`rows` of the tokens of all, in their order. -> the places of this rank's images whose
        pixels are not those of their digest, by which others would be answered too: where there are
        some, no rank goes on, and the next begin drops what has begun. Raises as Worker.launch
        does. 30 ms for 12 MiB."""
        self._pass, self._rows = None, []
        shares = divided([image.tokens for image in images], self.group.ranks)
        own = [images[at] for at in shares[self.group.rank]]
        # What is checked is the copy: another process may write to the memory.
        copies = [np.array(image.pixels, order="C") for image in own]
        found = zip(shares[self.group.rank], own, copies, strict=True)
        if wrong := [at for at, image, pixels in found if digest(pixels) != image.digest]:
            return wrong
        ends = np.cumsum([image.tokens for image in images])[:-1]
        each = np.split(rows, ends)
        with device_errors.translated("encode"), self.kernels.encoder.memory():
            of_ranks = [np.concatenate([rows[:0], *(each[at] for at in s)]) for s in shares]
            self._rows = self.kernels.upload(*of_ranks)
            self._left = self.tower.config.layers
            if own:
                flat = zip(self.kernels.upload(*copies), copies, strict=True)
                given = [each.view(pixels.shape) for each, pixels in flat]
                self._pass = self.tower.begin(self.kernels, given, self.normalisation)
        return []

    @torch.inference_mode()
    def run(self, layers: int) -> bool:
        """Goes on by so many layers, or with 0 to the end, where ranks wait for each other. ->
        whether it is complete, which it is on all ranks at once"""
        assert self._left, "begin is first"
        done = layers or self._left
        with device_errors.translated("encode"), self.kernels.encoder.memory():
            if self._pass is not None:
                self._pass.run(done)
            self._left -= min(done, self._left)
            if self._left:
                return False
            self._write_all()
            self._pass, self._rows = None, []
        return True

    def _write_all(self) -> None:
        """What each rank has made, to the cache of this one."""
        width = self.tower.config.width
        nothing = self.embeddings.new_empty(0, width)
        own = nothing if self._pass is None else self._pass.rows
        most, ranks = max(map(len, self._rows)), self.group.ranks
        some = max(1, GATHERED_BYTES // (ranks * width * own.element_size()))
        for start in range(0, most, some):
            count = min(some, most - start)
            part = own[start : start + count]
            if len(part) < count:  # another rank has more
                part = torch.cat((part, own.new_zeros(count - len(part), width)))
            for made, rows in zip(self.group.all_gather(part), self._rows, strict=True):
                into = rows[start : start + count]
                self._write(into, made[: len(into)])

    def _write(self, rows: torch.Tensor, made: torch.Tensor) -> None:
        own, *added = torch.split(made, self.embeddings.shape[1], dim=1)
        self.embeddings.index_copy_(0, rows, own)
        for into, each in zip(self.deepstack, added, strict=True):
            into.index_copy_(0, rows, each)
