"""Decoded images in the memory that this process shares with the engine, each once.

A place is kept while a request, a sequence of the engine or its own decoding needs it, and then
until another image needs the room: a file that comes again is not decoded again. Only for the event
loop; decoding runs in threads, a few at once and within bytes that all processes count together.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvline_server.http.errors import BadRequest, TooMany
from kvline_server.http.image_parts import refused
from kvline_server.images.bounds import ImageRefused
from kvline_server.images.pixels import pixels
from kvline_server.ipc.messages import SentImage
from kvline_server.ipc.pixels import Places, place_bytes
from kvline_server.ipc.totals import DECODE_BYTES, Totals
from kvline_server.options.clients import ClientLimits

if TYPE_CHECKING:
    from kvline_server.http.images import File
    from kvline_server.images.positions import Placed

MOST_UNREAD = 4096  # images that are kept for later: each takes objects beside its pixels
RETRY_SECONDS = 0.005  # where other processes decode


@dataclass(eq=False, slots=True)
class Image:
    """A place of the shared memory, and what is or will be in it."""

    key: bytes
    offset: int
    height: int
    width: int
    readers: int = 1  # its decoding, requests, and sequences of the engine
    digest: bytes = b""  # of the pixels, once they are there
    error: Exception | None = None  # why there are none
    waits: bool = True  # for its turn to be decoded
    decoding: asyncio.Task[None] | None = None


class Store:
    def __init__(self, places: Places, totals: Totals, limits: ClientLimits) -> None:
        self.limits = limits
        self.decoded = 0  # files
        self._places, self._totals = places, totals
        self._known: dict[bytes, Image] = {}  # by the key of the file
        self._unread: OrderedDict[bytes, Image] = OrderedDict()  # of these, the first to go first
        self._turn = asyncio.Lock()  # who waits for room is overtaken by nobody that needs some
        self._freed = asyncio.Event()
        self._decodes = asyncio.Semaphore(limits.parsing)

    @contextmanager
    def request(self) -> Iterator[Held]:
        """What one request holds, until it is answered."""
        held = Held(self)
        try:
            yield held
        finally:
            held.close()

    async def take(self, files: Sequence[File]) -> dict[bytes, Image]:
        """By the key of each file a place, with what is in it or is to be; waits for room. Who gets
        them leaves each once. Raises BadRequest where they fit no empty memory."""
        unique = {file.key: file for file in files}
        wanted = sum(place_bytes(*file.size) for file in unique.values())
        if wanted > self._places.total:
            raise BadRequest(
                f"messages: its images have {wanted} bytes of pixels; this server keeps "
                f'{self._places.total}: send fewer images, smaller ones, or "detail": "low"',
                "messages",
            )
        if all(key in self._known for key in unique) and (made := self._take(unique)) is not None:
            return made  # which takes no room from who waits for it
        async with self._turn:
            while (made := self._take(unique)) is None:
                self._freed.clear()
                await self._freed.wait()
        return made

    def read(self, images: Iterable[Image]) -> None:
        for image in images:
            image.readers += 1

    def leave(self, images: Iterable[Image]) -> None:
        for image in images:
            assert image.readers > 0, "an image that nobody holds: its place may be another's"
            image.readers -= 1
            if not image.readers:
                self._keep(image)
            elif image.readers == 1 and image.waits and image.decoding is not None:
                self._forget(image)  # nobody else has it, and nobody will
                image.decoding.cancel()

    def _keep(self, image: Image) -> None:
        if image.error is not None or self._known.get(image.key) is not image:
            self._drop(image)
        else:
            self._unread[image.key] = image
            if len(self._unread) > MOST_UNREAD:
                self._drop(self._unread.popitem(last=False)[1])
        self._freed.set()

    def _take(self, files: dict[bytes, File]) -> dict[bytes, Image] | None:
        """All of them, or none. New ones get the place of images that nobody reads, if need be."""
        found = {key: self._known[key] for key in files if key in self._known}
        new = [file for key, file in files.items() if key not in found]
        unread = {i.offset: i for key, i in self._unread.items() if key not in found}
        made = self._places.allocate_all([place_bytes(*file.size) for file in new], unread)
        if made is None:
            return None
        offsets, released = made
        for image in (unread[offset] for offset in released):
            del self._unread[image.key]
            self._forget(image)
        self.read(found.values())
        for key in found:
            self._unread.pop(key, None)
        return found | {
            file.key: self._decode(file, offset) for file, offset in zip(new, offsets, strict=True)
        }

    def _drop(self, image: Image) -> None:
        self._forget(image)
        self._places.release(image.offset)

    def _forget(self, image: Image) -> None:
        if self._known.get(image.key) is image:
            del self._known[image.key]

    def _decode(self, file: File, offset: int) -> Image:
        """Begins; the image is the caller's too."""
        image = Image(file.key, offset, *file.size, readers=2)
        self._known[file.key] = image
        image.decoding = asyncio.create_task(self._decoded(file, image))
        image.decoding.add_done_callback(lambda task: self._ended(image, task))
        return image

    async def _decoded(self, file: File, image: Image) -> None:
        """Goes on to its end though its request ends: a thread writes to the place."""
        try:
            async with self._decodes, self._working(file.work):
                image.waits = False
                image.digest = await asyncio.to_thread(self._write, file, image.offset)
                self.decoded += 1
        except Exception as error:
            image.error = error
            self._forget(image)

    def _ended(self, image: Image, decoding: asyncio.Task[None]) -> None:
        image.waits = False
        if decoding.cancelled():
            image.error = TooMany("nobody waited for this image")
        self.leave([image])

    @asynccontextmanager
    async def _working(self, nbytes: int) -> AsyncIterator[None]:
        """Within the bytes of all decodes under way, in all processes."""
        while not self._totals.take((DECODE_BYTES, nbytes, self.limits.decode_bytes)):
            await asyncio.sleep(RETRY_SECONDS)
        try:
            yield
        finally:
            self._totals.give((DECODE_BYTES, nbytes))

    def _write(self, file: File, offset: int) -> bytes:
        """Runs in a thread. -> the digest. Raises ImageRefused."""
        made = pixels(file.container, file.processor)
        self._places.write(offset, made.values)
        return made.digest


@dataclass(eq=False, slots=True)
class Held:
    """The images of one request."""

    store: Store
    images: dict[bytes, Image] = field(default_factory=dict)  # by key, as parts may have one file
    sent: list[SentImage] = field(default_factory=list)  # what the engine gets with each choice

    async def place(self, files: Sequence[File], placed: Sequence[Placed]) -> None:
        """Has all files decoded, `placed` in the prompt; may wait for room, and for its turn.
        Raises BadRequest for a broken one, and TooMany after a while."""
        try:
            async with asyncio.timeout(self.store.limits.image_wait):
                self.images = await self.store.take(files)
                for file in files:
                    image = self.images[file.key]
                    assert image.decoding is not None
                    await asyncio.wait([image.decoding])
                    if isinstance(image.error, ImageRefused):
                        raise refused(file.name, image.error)
                    if image.error is not None:
                        raise image.error
        except TimeoutError:
            raise TooMany("too many images are under way; try again later") from None
        self.sent = [
            SentImage(at.start, at.rows, at.columns, i.digest, i.offset, i.height, i.width)
            for at, i in zip(placed, (self.images[file.key] for file in files), strict=True)
        ]

    def read(self) -> Callable[[], None]:
        """For a sequence of the engine. -> what to call when it reads them no longer"""
        images = list(self.images.values())
        self.store.read(images)
        return lambda: self.store.leave(images)

    def close(self) -> None:
        images, self.images = self.images, {}
        self.store.leave(images.values())
