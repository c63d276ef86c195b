"""Requests with images, as HTTP gives them to an engine: each image is one that nobody had before,
and takes neither time nor memory before the encoder reads its pixels."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import image_shapes
import numpy as np
import offline
from numpy.typing import NDArray

from kvline_contract.launch import Device, EngineOptions, Images
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Image, Pictures
from kvline_server.images.digests import DIGEST_BYTES
from kvline_server.images.positions import Placed, mrope
from kvline_server.images.processor import MAX_RATIO, Grid
from kvline_server.sizing.images import PATCHES, PER_REQUEST

COLOURS, NUMBER = 3, 8  # bytes of a pixel, and of an image's number, its last ones
# Of a request's images: those that came before, as a conversation's next turn sends them again; of
# the others the small ones, photos, and squares at the limit. The rest are the widest strips.
AGAIN, SMALL, PHOTOS, SQUARES = 0.2, 0.7, 0.2, 0.05
RECENT = 64
FULL = 0.02  # of requests: those with as many images as they may have, all at the limit
# Sides of photos as they are sent, in tokens: few shapes, as cameras and screens have.
SIDES = ((15, 20), (20, 15), (24, 32), (34, 60), (60, 34), (45, 80))
REQUIRED = EngineOptions(images=Images.REQUIRED)  # at the default bounds
_numbers = itertools.count()  # of images, of all sources
Prompt = tuple[list[int], Pictures | None]


def longest(device: Device) -> dict[str, Any]:
    """Options of a start, for prompts that have room for as many images as they may have, all at
    the default limit, and for a text beside them."""
    tokens = PATCHES[device] // 4
    text = offline.MAX_MODEL_LEN if device is Device.CUDA else 2 * tokens
    return {"options": REQUIRED, "max_model_len": PER_REQUEST * tokens + text}


@dataclass(frozen=True, slots=True)
class Picture:
    grid: Grid
    number: int


@dataclass(frozen=True, slots=True)
class _Pixels:
    """Of noise, and a number. Made anew for each that asks, who has a copy of its own."""

    noise: NDArray[np.uint8]  # [bytes]
    shape: tuple[int, int, int]
    number: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        made = self.noise.copy()
        made[-NUMBER:] = np.frombuffer(self.number.to_bytes(NUMBER, "big"), np.uint8)
        return made.reshape(self.shape)


class Source:
    """Images of up to as many tokens as an engine encodes at once."""

    def __init__(self, name: str, engine: Engine) -> None:
        assert engine.encoding is not None, "it serves images"
        if engine.executor.ranks > 1:
            raise SystemExit("KVLINE_BENCH_GPUS: 1 with images, whose pixels no other process has")
        self.limit, self.token = engine.encoding.tokens, image_shapes.image_token(name)
        self.processor = image_shapes.processor(name, self.limit)
        nbytes = self.limit * self._side**2 * COLOURS
        self.noise = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self.made = self.sent = 0  # images, and those of prompts, of which some are sent again
        self._hashed: dict[tuple[int, int, int], Any] = {}  # of all but the number
        self._recent: deque[Picture] = deque(maxlen=RECENT)

    @property
    def _side(self) -> int:
        """Pixels of a token's."""
        return self.processor.patch * self.processor.merge

    def new(self, rows: float, columns: float) -> Picture:
        """Of a file of so many tokens by so many, resized as it must be."""
        self.made += 1
        pixels = (max(1, round(each * self._side)) for each in (rows, columns))
        return Picture(self.processor.grid(*pixels), next(_numbers))

    def drawn(self, rng: random.Random) -> Picture:
        """As clients send them, up to the limit."""
        if self._recent and rng.random() < AGAIN:
            return rng.choice(self._recent)
        self._recent.append(self.new(*self._sides(rng)))
        return self._recent[-1]

    def _sides(self, rng: random.Random) -> tuple[float, float]:
        """Of a file, in tokens."""
        kind, side = rng.random(), 2 * self.limit**0.5  # twice the limit's
        if kind < SMALL:
            return rng.randint(1, 12), rng.randint(1, 12)
        if kind < SMALL + PHOTOS:
            return rng.choice(SIDES)
        if kind < SMALL + PHOTOS + SQUARES:
            return side, side
        short = max(1, round(side / 8))
        strip = (short, short * min(MAX_RATIO, self.limit))
        return strip if rng.random() < 0.5 else strip[::-1]

    def among(self, rng: random.Random, text: list[int], room: int) -> Prompt:
        """A prompt of this text with one to PER_REQUEST images anywhere in it, of at most `room`
        tokens in all; without any where none that was drawn has room."""
        room -= len(text)
        parts, at = list[list[int] | Picture](), 0
        full, side = rng.random() < FULL, self.limit**0.5
        count = PER_REQUEST if full else rng.randint(1, PER_REQUEST)
        for place in sorted(rng.randint(0, len(text)) for _ in range(count)):
            picture = self.new(side, side) if full else self.drawn(rng)
            if picture.grid.tokens <= room:
                room -= picture.grid.tokens
                parts += [text[at:place], picture]
                at = place
        return self.prompt([*parts, text[at:]])

    def prompt(self, parts: Sequence[list[int] | Picture]) -> Prompt:
        tokens, images, placed = list[int](), list[Image](), list[Placed]()
        for part in parts:
            if isinstance(part, list):
                tokens += part
                continue
            start, grid = len(tokens), part.grid
            images.append(self._image(start, part))
            placed.append(Placed(start, grid.token_rows, grid.token_columns))
            tokens += [self.token] * grid.tokens
        if not images:
            return tokens, None
        self.sent += len(images)
        positions, shift = mrope(len(tokens), placed)
        return tokens, Pictures(tuple(images), positions.astype(np.int64), shift)

    def _image(self, start: int, picture: Picture) -> Image:
        grid, patch = picture.grid, self.processor.patch
        shape = (grid.rows * patch, grid.columns * patch, COLOURS)
        noise = self.noise[: shape[0] * shape[1] * COLOURS]
        if shape not in self._hashed:  # as images/digests, which would read each image whole
            self._hashed[shape] = hashlib.blake2b(repr(shape).encode(), digest_size=DIGEST_BYTES)
            self._hashed[shape].update(noise[:-NUMBER].data)
        hashed = self._hashed[shape].copy()
        hashed.update(picture.number.to_bytes(NUMBER, "big"))
        # np.array() of it, which is what the encoder takes, gives an array.
        pixels = cast(NDArray[np.uint8], _Pixels(noise, shape, picture.number))
        return Image(start, grid.tokens, hashed.digest(), pixels)
