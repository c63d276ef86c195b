"""From pixels to patches. Patches are in the order of the tokens that they become: those of one
token, a square of `merge` x `merge`, follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvline_server.images.processor import Grid, Normalisation
from kvline_server.kernels.interface import Kernels
from kvline_server.model.vision.config import CHANNELS, VisionConfig

ROWS = 4096  # that are computed at once where rows are apart: bounds what lies between two GEMMs


@dataclass(frozen=True, slots=True)
class Colours:
    """A Normalisation, where the pixels are."""

    rescale: float
    mean: torch.Tensor  # float32 [channels]
    std: torch.Tensor

    @classmethod
    def of(cls, by: Normalisation, kernels: Kernels) -> Colours:
        arrays = (np.asarray(each, np.float32) for each in (by.mean, by.std))
        return cls(by.rescale, *kernels.upload(*arrays))


def ordered(grid: Grid, by_place: torch.Tensor) -> torch.Tensor:
    """[rows, columns, ...] -> [patches, ...]"""
    m, rest = grid.merge, by_place.shape[2:]
    blocks = by_place.reshape(grid.token_rows, m, grid.token_columns, m, *rest)
    return blocks.transpose(1, 2).flatten(0, 3)


def places(grid: Grid, device: torch.device) -> torch.Tensor:
    """The row and column of each patch. -> int64 [patches, 2]"""
    rows, columns = (torch.arange(n, device=device) for n in (grid.rows, grid.columns))
    return ordered(grid, torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1))


def grid(pixels: torch.Tensor, config: VisionConfig) -> Grid:
    """Raises ValueError where the sides are none that images are resized to."""
    height, width, channels = pixels.shape
    unit = config.image or config.factor
    fits = channels == CHANNELS and not height % unit and not width % unit
    if pixels.dtype != torch.uint8 or not fits or (config.image and height * width != unit**2):
        raise ValueError(
            f"expected uint8 [height, width, {CHANNELS}] with sides of {unit}"
            f"{'' if config.image else ' times a number'}, got {pixels.dtype} {[*pixels.shape]}"
        )
    return Grid(height // config.patch, width // config.patch, config.merge)


def strips(pixels: torch.Tensor, config: VisionConfig) -> Iterator[torch.Tensor]:
    """An image's rows of tokens, some at a time, so that few patches are there at once."""
    patches = pixels.shape[1] // config.patch * config.merge  # of one row of tokens
    yield from torch.split(pixels, max(1, ROWS // patches) * config.factor)


def cut(
    pixels: torch.Tensor, config: VisionConfig, by: Colours, dtype: torch.dtype
) -> torch.Tensor:
    """Normalised in float32. A patch is its channels, frames, rows and columns.
    uint8 [height, width, channels] -> dtype [patches, config.inputs]"""
    p, m, frames = config.patch, config.merge, config.frames
    high, wide = (side // config.factor for side in pixels.shape[:2])
    values = pixels.float().mul_(by.rescale).sub_(by.mean).div_(by.std)
    blocks = values.view(high, m, p, wide, m, p, CHANNELS).permute(0, 3, 1, 4, 6, 2, 5)
    out = torch.empty((high, wide, m, m, CHANNELS, frames, p, p), dtype=dtype, device=pixels.device)
    return out.copy_(blocks.unsqueeze(5)).view(-1, config.inputs)
