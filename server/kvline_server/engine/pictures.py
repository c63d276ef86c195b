"""Images of a prompt: where their tokens are, and what keys the pages that have these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvline_server.ipc.pixels import Place
from kvline_server.memory.pages import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Image:
    start: int  # place of its first token in the prompt
    tokens: int
    digest: bytes  # of its pixels and their shape
    pixels: NDArray[np.uint8]  # [height, width, 3], resized
    place: Place | None = None  # of the pixels; None: no other process has them

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Pictures:
    """Those of a prompt, in their order, and the positions of its tokens where these differ by
    axis."""

    images: tuple[Image, ...]
    axes: NDArray[np.int64] | None = None  # [3, prompt]: time, row and column
    shift: int = 0  # of the positions of all tokens behind the prompt

    def within(self, start: int, end: int) -> Sequence[Image]:
        """Those that have tokens in this part of the prompt."""
        return [image for image in self.images if image.start < end and start < image.end]

    def extras(self) -> dict[int, bytes]:
        """By page, what its key has beside token ids, which are the same in all images: whose
        tokens it has, from which one on. Without it one client would be shown another's image."""
        found: dict[int, bytes] = {}
        for image in self.images:
            for page in range(image.start // PAGE_SIZE, -(-image.end // PAGE_SIZE)):
                skipped = max(0, page * PAGE_SIZE - image.start)
                own = image.digest + skipped.to_bytes(8, "big")
                found[page] = found.get(page, b"") + own
        return found
