"""What all towers are: layers over the patches of some images, and what makes tokens of these.

A pass runs in slices of layers, so that the steps of a text model come between: a large image takes
seconds. It keeps its images' rows between two slices, and its results from its begin on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.images.processor import Grid, Normalisation
from kvline_server.kernels.encoder import Angles
from kvline_server.kernels.interface import Kernels
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.layers import Layer, Merger
from kvline_server.model.vision.patches import Colours, cut, grid, places, strips
from kvline_server.model.vision.weights import Linear


@dataclass(slots=True)
class Work:
    """What layers read and write of the images of a pass."""

    x: torch.Tensor  # the residual, [patches, hidden]
    plan: Any  # of Encoder: an image is a sequence
    angles: Angles | None = None
    windows: Any = None  # the same as `plan`, of each window; None: there are none
    # Of tokens in the order of `x`, theirs in the images; None: the same.
    order: torch.Tensor | None = None


class Tower(ABC):
    """Its weights, whole on each rank."""

    config: VisionConfig
    patches: Linear  # embeds them
    layers: list[Layer]
    deepstack: Sequence[Merger] = ()  # behind layers of config.deepstack
    elements: int = 0  # of all its tensors

    def nbytes(self, dtype: torch.dtype) -> int:
        """In a model of this dtype."""
        return self.elements * dtype.itemsize

    def begin(self, kernels: Kernels, images: Sequence[torch.Tensor], by: Normalisation) -> Pass:
        """A pass of one or more images, on the kernels' device: uint8 [height, width, channels]
        each, resized. Raises ValueError for sides that the tower does not take."""
        return Pass(self, kernels, images, by)

    @abstractmethod
    def prepare(self, kernels: Kernels, x: torch.Tensor, grids: Sequence[Grid]) -> Work:
        """`x` are embedded patches of all images, which it may overwrite."""

    @abstractmethod
    def merge(self, kernels: Kernels, work: Work, rows: torch.Tensor) -> None:
        """Behind the last layer: into the first `config.out` elements of each row."""

    def embed(
        self, kernels: Kernels, images: Sequence[torch.Tensor], by: Normalisation, count: int
    ) -> torch.Tensor:
        """-> [count patches, hidden]"""
        shape = (count, self.config.hidden)
        x = torch.empty(shape, dtype=kernels.dtype, device=kernels.device)
        start, colours = 0, Colours.of(by, kernels)
        for strip in (each for pixels in images for each in strips(pixels, self.config)):
            own = cut(strip, self.config, colours, kernels.dtype)
            self.patches.into(own, x[start : start + len(own)])
            start += len(own)
        return x


class Pass:
    """Some images on their way through a tower."""

    def __init__(
        self,
        tower: Tower,
        kernels: Kernels,
        images: Sequence[torch.Tensor],
        by: Normalisation,
    ) -> None:
        self.tower, self.kernels = tower, kernels
        self.grids = [grid(pixels, tower.config) for pixels in images]
        tokens = sum(each.tokens for each in self.grids)
        x = tower.embed(kernels, images, by, sum(each.patches for each in self.grids))
        self._rows = x.new_empty(tokens, tower.config.width)
        self._work: Work | None = tower.prepare(kernels, x, self.grids)
        self.done = 0  # layers

    @property
    def complete(self) -> bool:
        return self._work is None

    @property
    def rows(self) -> torch.Tensor:
        """Once it is complete, a row a token in the order of the images: what stands in the place
        of its embedding, then what deepstack adds to each of the text model's first layers.
        [tokens, config.width]"""
        assert self.complete
        return self._rows

    def run(self, layers: int) -> bool:
        """Goes on by so many layers, or to the end. -> whether it is complete"""
        work, tower = self._work, self.tower
        if work is None:
            return True
        end = min(self.done + layers, len(tower.layers))
        for at in range(self.done, end):
            whole = work.windows is None or at in tower.config.whole
            plan = work.plan if whole else work.windows
            tower.layers[at].run(self.kernels, work.x, plan, work.angles)
            self._stack(at, work.x)
        self.done = end
        if end == len(tower.layers):
            tower.merge(self.kernels, work, self._rows)
            self._work = None
        return self.complete

    def _stack(self, layer: int, x: torch.Tensor) -> None:
        """What deepstack reads of the residual behind this layer."""
        config = self.tower.config
        if layer in config.deepstack:
            at, out = config.deepstack.index(layer), config.out
            into = self._rows[:, (1 + at) * out : (2 + at) * out]
            self.tower.deepstack[at].run(self.kernels, x, config.merge**2, into)


def plan(kernels: Kernels, config: VisionConfig, lengths: Sequence[int]) -> Any:
    """Of attention over sequences of so many patches each."""
    return kernels.encoder.plan(lengths, config.heads, config.head_dim)


def angles(kernels: Kernels, config: VisionConfig, grids: Sequence[Grid]) -> Angles:
    """Of all patches, in their order."""
    of_grid = {each: places(each, kernels.device) for each in set(grids)}
    every = torch.cat([of_grid[each] for each in grids])
    return Angles.of(every, config.head_dim, config.theta)
