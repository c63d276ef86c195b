"""Images of requests, from what an HTTP process sent to what the engine takes."""

from __future__ import annotations

from kvline_server.engine.pictures import Image, Pictures
from kvline_server.errors import InvalidFrame
from kvline_server.images.positions import Placed, mrope
from kvline_server.ipc.messages import Submit
from kvline_server.ipc.pixels import Place, SharedPixels


def pictures(sent: Submit, pixels: SharedPixels | None, axes: bool) -> Pictures:
    """Of a sequence that has images; their pixels stay where they are. `axes`: whether positions
    differ by axis. Raises InvalidFrame for images that are not within the prompt and the memory."""
    if pixels is None:
        raise InvalidFrame("images for an engine that shares no memory for pixels")
    end, made, placed = 0, list[Image](), list[Placed]()
    for image in sent.images:
        if min(image.rows, image.columns) < 1 or image.start < end:
            raise InvalidFrame(f"an image of {image.rows} x {image.columns} at {image.start}")
        end = image.start + image.tokens
        view = pixels.view(image.offset, image.height, image.width)
        place = Place(pixels.process, image.offset)
        made.append(Image(image.start, image.tokens, image.digest, view, place))
        placed.append(Placed(image.start, image.rows, image.columns))
    if end > len(sent.tokens):
        raise InvalidFrame(f"an image that ends at {end} of {len(sent.tokens)} tokens")
    if not axes:
        return Pictures(tuple(made))
    positions, shift = mrope(len(sent.tokens), placed)
    return Pictures(tuple(made), positions.astype("int64"), shift)
