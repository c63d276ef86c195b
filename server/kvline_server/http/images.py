"""Images that a model takes: from URLs to files whose sizes are known, and their tokens in a
prompt. What is decoded of them is image_store's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvline_contract.report import Effective
from kvline_server.http.chat_tokens import ChatTokens, Rendered
from kvline_server.http.errors import NotRendered
from kvline_server.http.image_store import Store
from kvline_server.http.tokens import Tokens
from kvline_server.images.bounds import Bounds, ImageRefused
from kvline_server.images.container import Container, opened
from kvline_server.images.digests import file_digest
from kvline_server.images.pixels import work_bytes
from kvline_server.images.positions import Placed, expand
from kvline_server.images.processor import Grid, Processor
from kvline_server.images.url import image_bytes
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.vision import preprocessor
from kvline_server.model.vision.config import image_token

BEGIN, END = "boi_token_index", "eoi_token_index"  # in config.json


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """An image of a request, of which the header was read."""

    name: str  # of its part
    container: Container
    processor: Processor  # of its detail
    grid: Grid
    key: bytes  # of its bytes, and what they are resized to
    work: int  # bytes that decoding takes
    url_bytes: int  # that its URL had
    of_tool: bool = False  # whether it is in a tool's result

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, resized."""
        return self.processor.resized(*self.container.upright)


@dataclass(frozen=True, slots=True)
class ImageToken:
    """What stands for an image in a rendered chat, and then as often as it has tokens."""

    id: int
    mark: str = ""  # that templates write instead of it, where they do
    between: str = ""  # what the mark becomes: the token between marks and line breaks

    def written(self, rendered: Rendered) -> Rendered:
        """With the token for each mark that the template wrote, and not a client."""
        if not self.mark:
            return rendered
        text, origins = rendered
        made, of, at = list[str](), list[bytes](), 0
        while (start := text.find(self.mark, at)) >= 0:
            end = start + len(self.mark)
            own = not any(origins[start:end])  # traced.OWN
            made += [text[at:start], self.between if own else self.mark]
            of += [origins[at:start], bytes(len(self.between)) if own else origins[start:end]]
            at = end
        return "".join([*made, text[at:]]), b"".join([*of, origins[at:]])


@dataclass(frozen=True, slots=True)
class Images:
    processor: Processor
    bounds: Bounds
    token: ImageToken
    store: Store

    def file(self, name: str, url: str, detail: str, of_tool: bool = False) -> File:
        """Raises ImageRefused. Decodes nothing."""
        processor = self.processor.detailed(detail)
        data = image_bytes(url, self.bounds)
        container = opened(data, self.bounds)
        work, most = work_bytes(container, processor), self.store.limits.decode_bytes
        if work > most:
            raise ImageRefused(
                f"expected an image that takes at most {most} bytes to decode, got one of "
                f"{container.width} x {container.height} pixels that may take {work}; scale it down"
            )
        grid = processor.grid(*container.upright)
        key = file_digest(data, processor)  # whole: a container's data has lost which side is up
        return File(name, container, processor, grid, key, work, len(url), of_tool)

    def tokenise(
        self, chat: ChatTokens, rendered: Rendered, most: int, files: Sequence[File]
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """A prompt with all tokens of its images, and where these are. Raises as ChatTokens does,
        and NotRendered where the template wrote another number of images."""
        ids = chat.tokenise(self.token.written(rendered), most)
        try:
            prompt, placed = expand(ids, self.token.id, [file.grid for file in files])
        except ImageRefused as refused:
            raise NotRendered(f"messages: {refused}", "messages") from None
        return prompt.tolist(), placed


def open_images(folder: Path, tokens: Tokens | None, effective: Effective, store: Store) -> Images:
    """Of a model folder and a validated engine. Raises ModelInvalid and its like."""
    images, patches = effective.max_images_per_request, effective.max_image_patches
    assert images is not None and patches is not None, "text alone is served"
    fits = min(Bounds().file_bytes, store.limits.image_file_bytes())
    bounds = Bounds(file_bytes=fits, images=images, patches=patches)
    processor = preprocessor.read(folder).within(patches)
    return Images(processor, bounds, read_token(folder, tokens), store)


def read_token(folder: Path, tokens: Tokens | None) -> ImageToken:
    """Raises ModelInvalid where config.json has none. Gemma's templates write the mark of an
    image's beginning alone."""
    path = folder / preprocessor.CONFIG
    config = Fields(read_json(path), path)
    id, texts = image_token(config), {}
    if tokens is not None:
        texts = {each: text for text, each in tokens.added.items()}
    begin, token, end = (texts.get(i, "") for i in (config.value(BEGIN), id, config.value(END)))
    between = f"\n\n{begin}{token}{end}\n\n" if begin else ""
    return ImageToken(id, begin, between)
