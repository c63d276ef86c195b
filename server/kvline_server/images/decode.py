"""Pixels of a file, by Pillow: red, green and blue, turned as EXIF says.

As transformers' processors do it: what is transparent lies over white, and colour profiles are
ignored. Of an animation it is the first frame. 16 bits become the upper 8.
"""

from __future__ import annotations

import io
import warnings

import numpy as np

# Image.open imports all plugins where one that is asked for is missing.
from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from kvline_server.images.bounds import ImageRefused
from kvline_server.images.container import Container

assert GifImagePlugin and JpegImagePlugin and PngImagePlugin and WebPImagePlugin
# Ours is checked by the header, in container.py: this one warns, and ends at twice its number.
Image.MAX_IMAGE_PIXELS = None
# They quote the file, and Python keeps each text that it has shown.
warnings.filterwarnings("ignore", module=r"PIL\.")

BAND = 1 << 15  # pixels that are laid over white at a time: five copies of all would be held else
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decoded(container: Container) -> Image.Image:
    """An image of mode RGB, upright. Raises ImageRefused where the file is broken."""
    try:
        image = _opened(container)
        if (turn := _TURNS.get(container.orientation)) is not None:
            image = image.transpose(turn)
        return image
    except ImageRefused:
        raise
    except UnidentifiedImageError:  # whose message has an address of ours
        raise _broken(container, "its header is broken") from None
    # Pillow names no errors of its parsers: from hostile files they are of every kind, and none
    # of them is the server's fault.
    except Exception as error:
        raise _broken(container, f"{error!s:.80}") from None


def _broken(container: Container, why: str) -> ImageRefused:
    return ImageRefused(
        f"expected a whole {container.format}, got one that does not decode: {why}; save the image "
        "again"
    )


def _opened(container: Container) -> Image.Image:
    image = Image.open(io.BytesIO(container.data), formats=[container.format])
    if image.size != (container.width, container.height):
        raise ImageRefused(
            f"expected {container.width} x {container.height} pixels as in the header, got "
            f"{image.width} x {image.height}; save the image again"
        )
    image.load()
    return _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _of_16_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_16_bits(image: Image.Image) -> Image.Image:
    """The upper byte, as PNGs of 16 bits a colour are read. Pillow's own conversion of grey ones
    makes white of all above 255."""
    values = np.asarray(image)
    upper = (values >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        upper[values == clear] = 255
    return Image.fromarray(upper).convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    made = Image.new("RGB", image.size)
    rows = max(1, BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(image.height, top + rows))).convert("RGBA")
        white = Image.new("RGBA", band.size, "white")
        made.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return made
