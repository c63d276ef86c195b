"""The images in a conversation: found, and refused by their place in the request.

Imports no decoder: a server of text alone has none in its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvline_server.http.errors import BadRequest, NotRendered
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
        (f"messages[{index}].content[{at}].image_url", part, message.role == "tool")
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
    return [_file(images, *part) for part in parts]


def _file(images: Images, name: str, part: ImagePart, of_tool: bool) -> File:
    url, part.image_url.url = part.image_url.url, ""
    try:
        return images.file(name, url, part.image_url.detail, of_tool)
    except ImageRefused as invalid:
        raise refused(name, invalid) from None


@contextmanager
def written(files: Sequence[File]) -> Iterator[None]:
    """What a template does wrong is an error of the first image in a tool's result: not all of them
    write some there."""
    try:
        yield
    except NotRendered as failed:
        first = next((file.name for file in files if file.of_tool), None)
        if first is None:
            raise
        why = failed.message.removeprefix("messages: ")
        advice = "it may take no images in a tool's result: send them in a user's message"
        raise BadRequest(f"{first}: {why}; {advice}", first) from None


def refused(name: str, why: ImageRefused) -> BadRequest:
    """Of the part with this name."""
    return BadRequest(f"{name}: {why}", name)
