"""Where a prompt has its pictures' tokens, and the three positions of each token (Qwen's mrope).

Computed once for the whole prompt, and sliced by chunk: positions behind a picture depend on all
pictures before, and run behind the tokens' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvline_server.images.bounds import ImageRefused
from kvline_server.images.processor import Grid


@dataclass(frozen=True, slots=True)
class Placed:
    """The tokens of one picture in a prompt, row by row."""

    start: int  # of the first, in the prompt
    rows: int  # of tokens
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


def expand(
    tokens: Sequence[int], placeholder: int, grids: Sequence[Grid]
) -> tuple[NDArray[np.int32], tuple[Placed, ...]]:
    """The prompt with as many placeholders for each picture as it has tokens, where the template
    wrote one; and where they are, in order.

    Raises ImageRefused where there are more or fewer placeholders than pictures."""
    prompt = np.asarray(tokens, np.int32)
    at = np.flatnonzero(prompt == placeholder)
    if len(grids) and not len(at):
        raise ImageRefused(
            "the model's chat template writes no images in messages such as these, and would drop "
            f"all {len(grids)}; send text alone, or ask for a template that writes them"
        )
    if len(at) != len(grids):
        raise ImageRefused(
            f"expected one image token in the prompt for each of its {len(grids)} images, got "
            f"{len(at)}; leave the model's image token (id {placeholder}) out of texts, and send "
            "images as parts"
        )
    counts = np.ones(len(prompt), np.int64)
    counts[at] = [grid.tokens for grid in grids]
    starts = at + np.cumsum([0, *(grid.tokens - 1 for grid in grids)])[: len(at)]
    placed = tuple(
        Placed(int(start), grid.token_rows, grid.token_columns)
        for start, grid in zip(starts, grids, strict=True)
    )
    return np.repeat(prompt, counts), placed


def mrope(length: int, placed: Sequence[Placed]) -> tuple[NDArray[np.int32], int]:
    """Positions [3, length] of a prompt's tokens by time, row and column, and what a decode's
    number has to be added to for its position, in all three: the token at n is at n + delta.

    Text advances all three. A picture at p has p, p + its row and p + its column, and the text
    behind it goes on at p + the larger of rows and columns. `placed` is in order."""
    positions = np.empty((3, length), np.int32)
    done = position = 0  # tokens, and where the next one is
    for image in placed:
        assert done <= image.start and image.end <= length, "pictures overlap, or leave the prompt"
        text = image.start - done
        positions[:, done : image.start] = np.arange(position, position + text)
        position += text
        inside = positions[:, image.start : image.end].reshape(3, image.rows, image.columns)
        inside[0] = position
        inside[1] = position + np.arange(image.rows)[:, None]
        inside[2] = position + np.arange(image.columns)
        positions[:, image.start : image.end] = inside.reshape(3, -1)
        position += max(image.rows, image.columns)
        done = image.end
    positions[:, done:] = np.arange(position, position + length - done)
    return positions, position - done
