"""Pictures that tests draw, and files of them in each format."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from kvline_server.images.bounds import Bounds
from kvline_server.images.container import opened
from kvline_server.images.decode import decoded
from kvline_server.images.processor import Normalisation, Processor

HALVES = Normalisation(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def processor(
    patch: int = 16, shortest: int = 65_536, longest: int = 16_777_216, **others: Any
) -> Processor:
    """Qwen3-VL's, or another of Qwen's; `others` are of `Processor`."""
    usual: dict[str, Any] = {"merge": 2, "temporal": 2, "normalisation": HALVES, "resample": 3}
    usual |= {"shortest": shortest, "longest": longest}
    return Processor(patch=patch, **{**usual, **others})


def gemma() -> Processor:
    return Processor(14, 4, 1, HALVES, 2, fixed=(896, 896))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def gradient(width: int, height: int) -> Image.Image:
    across = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    down = np.broadcast_to(np.linspace(255, 0, height)[:, None], (height, width))
    return Image.fromarray(np.stack([across, down, (across + down) / 2], -1).astype(np.uint8))


def text(width: int, height: int) -> Image.Image:
    """Lines of it, all over the picture."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for line, top in enumerate(range(0, height, 12)):
        draw.text((2, top), f"{line}: a budget is validated before traffic. " * 4, fill=(9, 30, 99))
    return image


def faded(image: Image.Image) -> Image.Image:
    """With an alpha that falls from left to right."""
    alpha = gradient(*image.size).getchannel("R")
    made = image.convert("RGBA")
    made.putalpha(alpha)
    return made


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def seen(data: bytes, bounds: Bounds | None = None) -> NDArray[np.uint8]:
    """What we decode of a file: [height, width, 3]."""
    return np.asarray(decoded(opened(data, bounds or Bounds())))


def chunk(name: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def png(width: int, height: int, *chunks: bytes, rows: bytes = b"", depth: int = 8) -> bytes:
    """A grey one of any header, whose pixels are `rows`, compressed; `chunks` are before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(rows, 9))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + b"".join(chunks) + pixels + chunk(b"IEND", b"")
