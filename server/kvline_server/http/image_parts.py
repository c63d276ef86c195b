"""The images in a conversation: found, and refused by their place in the request.

Imports no decoder: a server of text alone has none in its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.messages import ChatMessage, ImagePart
from kvline_server.images.bounds import ImageRefused

if TYPE_CHECKING:
    from kvline_server.http.images import File, Images

TEXT_ALONE = (
    "this server takes text alone; where the model has a vision encoder, spec.engine.modalities "
    "with image serves images too"
)


def read(messages: list[ChatMessage], images: Images | None) -> list[File]:
    """The files of all images, in their order; their URLs are dropped. Takes as long as their
    bytes do, so it runs off the event loop. Raises BadRequest."""
    parts = [
        (f"messages[{index}].content[{at}].image_url", part)
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    if not parts:
        return []
    if images is None:
        name = parts[0][0]
        raise BadRequest(f"{name}: {TEXT_ALONE}", name, "unsupported_value")
    try:
        images.bounds.check_count(len(parts))
    except ImageRefused as refused:
        raise BadRequest(f"messages: {refused}", "messages") from None
    return [_file(name, part, images) for name, part in parts]


def _file(name: str, part: ImagePart, images: Images) -> File:
    url, part.image_url.url = part.image_url.url, ""
    try:
        return images.file(name, url, part.image_url.detail)
    except ImageRefused as invalid:
        raise refused(name, invalid) from None


def refused(name: str, why: ImageRefused) -> BadRequest:
    """Of the part with this name."""
    return BadRequest(f"{name}: {why}", name)
