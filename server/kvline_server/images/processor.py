"""How a model's image processor resizes: to how many patches, and so to how many tokens.

`Processor.grid` counts for all that need to know: admission, the encoder, and where a prompt has
the tokens. It gives what transformers' processors give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvline_server.errors import ConfigInvalid
from kvline_server.images.bounds import ImageRefused

LOW_PIXELS = 512 * 512  # what `detail: low` is resized to at most
MAX_RATIO = 200  # of the longer side to the other


@dataclass(frozen=True, slots=True)
class Grid:
    """Of a resized image, in patches."""

    rows: int
    columns: int
    merge: int  # patches of each side that become one token

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.token_rows * self.token_columns

    @property
    def token_rows(self) -> int:
        return self.rows // self.merge

    @property
    def token_columns(self) -> int:
        return self.columns // self.merge


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What the vision encoder gets of a pixel: (pixel * rescale - mean) / std of its colour."""

    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Processor:
    """A model's, as its files say (model/vision/preprocessor.py)."""

    patch: int  # pixels of a side
    merge: int  # patches of a side that become one token
    temporal: int  # frames of a patch; a picture is each of them
    normalisation: Normalisation
    resample: int  # Pillow's number of a filter
    # Pixels that a resized image has at least and at most; or the one size of all, height and
    # width, where a model has one.
    shortest: int = 0
    longest: int = 0
    fixed: tuple[int, int] | None = None
    max_patches: int | None = None  # of an image: more are refused

    def within(self, max_patches: int) -> Processor:
        """With no more patches an image. Where the model's own limit is higher it is lowered to
        that, so larger images are resized further and not refused. What its shape alone keeps above
        the bound is: a strip whose shorter side is a token is not made narrower.

        Raises ConfigInvalid where no image could be within it."""
        least = self.patches_of(*self.fixed) if self.fixed else self.merge**2
        if max_patches < least:
            raise ConfigInvalid(
                f"engine.maxImagePatches: expected at least {least}, which this model's smallest "
                f"image has, got {max_patches}"
            )
        return replace(self._at_most(max_patches * self.patch**2), max_patches=max_patches)

    def detailed(self, detail: str) -> Processor:
        """As a request asks: `low` is at most LOW_PIXELS; `high` and `auto` are the model's limits.
        Raises ImageRefused for another word."""
        if detail not in ("low", "high", "auto"):
            raise ImageRefused(f"detail: expected low, high or auto, got {detail[:20]!r}")
        return self._at_most(LOW_PIXELS) if detail == "low" else self

    def grid(self, height: int, width: int) -> Grid:
        """Of an image of so many pixels. Raises ImageRefused for a shape that is not served."""
        high, wide = self.resized(height, width)
        found = Grid(high // self.patch, wide // self.patch, self.merge)
        if self.max_patches is not None and found.patches > self.max_patches:
            raise ImageRefused(
                f"expected an image of at most {self.max_patches} patches, got {width} x {height} "
                f"pixels, which are {found.patches} at the least; crop the image to a shape that "
                "is less narrow"
            )
        return found

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels after resizing, as transformers' `smart_resize`."""
        if self.fixed:
            return self.fixed
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ImageRefused(
                f"expected sides of a ratio of at most {MAX_RATIO}, got {width} x {height} pixels; "
                "crop the image, or pad it"
            )
        side = self.patch * self.merge
        # round() is half to even: 80 pixels are 64 at a side of 32, and 112 are 128.
        high, wide = round(height / side) * side, round(width / side) * side
        too_large = high * wide > self.longest
        if high * wide < self.shortest and not too_large:
            scale = math.sqrt(self.shortest / (height * width))
            high = math.ceil(height * scale / side) * side
            wide = math.ceil(width * scale / side) * side
            # Where our bound is close to `shortest`; transformers has none.
            too_large = self.max_patches is not None and high * wide > self.longest
        if too_large:
            scale = math.sqrt(height * width / self.longest)
            high = max(side, math.floor(height / scale / side) * side)
            wide = max(side, math.floor(width / scale / side) * side)
        return high, wide

    def patches_of(self, height: int, width: int) -> int:
        """Of an image that has this size once it is resized."""
        return (height // self.patch) * (width // self.patch)

    def _at_most(self, pixels: int) -> Processor:
        if self.fixed or pixels >= self.longest:
            return self
        return replace(self, longest=pixels, shortest=min(self.shortest, pixels))
