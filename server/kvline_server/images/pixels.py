"""A picture as the vision encoder gets it, before it is normalised: uint8, and its digest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvline_server.images.container import Container, Format
from kvline_server.images.decode import decoded
from kvline_server.images.digests import digest
from kvline_server.images.processor import Grid, Processor

# Of what decoding and resizing hold at most, as tests/server/test_images_hostile.py measures it.
# The file: without its metadata, and twice as Pillow hands it to WebP's decoder.
FILE_COPIES = 3
# A pixel, by format: Pillow's image, which may be of one byte or of a mode that is converted, and
# one that is turned. For a PNG of 16 bits also their upper ones, for WebP its decoder's canvases.
STORED_BYTES: dict[Format, int] = {"JPEG": 9, "GIF": 9, "PNG": 13, "WEBP": 16}
DECODER_BYTES = 2 << 20  # of any: its tables, a few rows, and what the allocator does not reuse
IMAGE_BYTES = 4  # a pixel of Pillow's image
RESIZED_BYTES = 12  # a pixel: Pillow's image, one that is resized in one direction, and ours


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    values: NDArray[np.uint8]  # [height, width, 3], contiguous, read-only
    grid: Grid
    digest: bytes  # of values and shape: two pictures of one digest are the same to the model


def work_bytes(container: Container, processor: Processor) -> int:
    """Bytes that `pixels` holds at most while it runs, beside the file itself, with its result.
    Raises ImageRefused for a shape that the processor does not take."""
    height, width = processor.resized(*container.upright)
    stored = max(STORED_BYTES[container.format], IMAGE_BYTES + container.coefficients)
    return (
        DECODER_BYTES
        + FILE_COPIES * len(container.data)
        + stored * container.height * container.width
        + RESIZED_BYTES * height * width
    )


def pixels(container: Container, processor: Processor) -> Pixels:
    """Of a file, decoded and resized. Raises ImageRefused for a broken file, and for a shape that
    the processor does not take; that one before anything is decoded."""
    grid = processor.grid(*container.upright)
    values = resized(decoded(container), processor)
    return Pixels(values, grid, digest(values))


def resized(image: Image.Image, processor: Processor) -> NDArray[np.uint8]:
    """Of an image of mode RGB, by the processor's filter: [height, width, 3], contiguous and
    read-only."""
    height, width = processor.resized(image.height, image.width)
    return np.asarray(image.resize((width, height), Image.Resampling(processor.resample)))
