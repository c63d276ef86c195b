"""Ranks of a tiny model that sees images, each a thread, and the memory of their pixels."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from image_models import Part, bounds_of, over, prompt_of, rank_of
from vision_models import saved
from waiting import limit

from kvline_server.engine.encoding import Bounds
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Image, Pictures
from kvline_server.ipc.pixels import PAGE, Place, Places, create, place_bytes, shared_pixels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.config import read_config
from kvline_server.parallel import wire
from kvline_server.parallel.executor import Local
from kvline_server.parallel.follow import Follower
from kvline_server.parallel.gloo import GlooGroup
from kvline_server.parallel.link import Link
from kvline_server.parallel.ranks import Ranks
from kvline_server.worker.encoder import Encoder

LENGTH, RUNNING, PAGES = 400, 4, 60


@dataclass
class Pod:
    engine: Engine
    locals: list[Local]  # of each rank
    places: Places  # of the only HTTP process
    file: int
    family: str
    failed: dict[int, BaseException] = field(default_factory=dict)

    @property
    def encoders(self) -> list[Encoder]:
        found = [each.encoder for each in self.locals]
        return [each for each in found if each is not None]

    def prompt(self, parts: Sequence[Part]) -> tuple[list[int], Pictures]:
        """As HTTP sends it."""
        tokens, pictures = prompt_of(self.family, parts)
        return tokens, replace(pictures, images=tuple(map(self._shared, pictures.images)))

    def _shared(self, image: Image) -> Image:
        height, width, _ = image.pixels.shape
        offset = self.places.allocate(place_bytes(height, width))
        assert offset is not None
        self.places.write(offset, image.pixels)
        (memory,) = shared_pixels([self.file])
        view = memory.view(offset, height, width)
        return replace(image, pixels=view, place=Place(memory.process, offset))


def at_once(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each rank makes, on a thread of its own."""
    made: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: made.update({rank: work(rank)}))
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(30))
    return [made[rank] for rank in range(ranks)]


@contextmanager
def pod(
    family: str,
    folder: Path,
    ranks: int = 2,
    step: int = 64,
    bounds: Bounds | None = None,
    seconds: float = 20.0,
) -> Iterator[Pod]:
    """Which wait for each other for so many seconds."""
    saved(family)  # once, before threads ask for it
    bounds = bounds or bounds_of(family, step)
    groups = at_once(lambda rank: GlooGroup(rank, ranks, folder, limit(seconds)), ranks)
    kernels = [TorchKernels(group=group) for group in groups]
    sizes = bounds, step, RUNNING, PAGES, LENGTH, RUNNING
    locals = [rank_of(family, each, *sizes) for each in kernels]
    file, pixels = os.memfd_create("steps"), create(64 * PAGE)
    config = read_config(saved(family).folder)
    room = wire.step_bytes(step, RUNNING, LENGTH, config.vocabulary, ranks, len(locals[0].pages))
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    links = [Link(ours, rank) for rank, (ours, _) in enumerate(pairs, 1)]
    every = Ranks(locals[0], groups[0], links, wire.Steps(file, room, 2, ranks - 1), limit(20))
    one = over(every, family, bounds, step, RUNNING, LENGTH)
    made = Pod(one, locals, Places(pixels), pixels, family)

    def follow(rank: int) -> None:
        end, steps = pairs[rank - 1][1], wire.Steps(file, room, 2, ranks - 1)
        where = Link(end, 0), steps, shared_pixels([pixels])
        try:
            Follower(locals[rank], groups[rank], *where).serve()
        except BaseException as error:
            made.failed[rank] = error
        finally:
            end.close()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for ours, _ in pairs:
            ours.close()
        for thread in threads:
            thread.join(limit(20))
            assert not thread.is_alive(), "a rank outlives rank 0"
        for group in groups:
            group.close()
        for each in (file, pixels):
            os.close(each)


def same_rows(made: Pod) -> bool:
    """Whether each rank has the same in its cache."""
    first, *others = made.encoders
    return all(
        torch.equal(first.embeddings, each.embeddings)
        and torch.equal(first.deepstack, each.deepstack)
        for each in others
    )
