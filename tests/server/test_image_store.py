"""The store of decoded images by itself: who holds a place, and who gets one next."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import noise, processor, saved
from PIL import Image
from waiting import limit

from kvline_server.http.errors import BadRequest, TooMany
from kvline_server.http.image_store import Held, Store
from kvline_server.http.images import File
from kvline_server.images.bounds import Bounds
from kvline_server.images.container import opened
from kvline_server.images.digests import file_digest
from kvline_server.images.pixels import work_bytes
from kvline_server.images.positions import Placed
from kvline_server.ipc.pixels import PAGE, Places, SharedPixels, create
from kvline_server.ipc.totals import Totals
from kvline_server.ipc.totals import create as create_totals
from kvline_server.options.clients import ClientLimits

PAGES = 6
PROCESSOR = processor(patch=4, shortest=64, longest=64 * 64)
# Of one page twice, of two, and of three twice.
DRAWN = [
    noise(*size, seed)
    for seed, size in enumerate([(24, 16), (24, 16), (48, 48), (64, 64), (64, 64)])
]


def file_of(image: Image.Image) -> File:
    data = saved(image, "PNG")
    container = opened(data, Bounds())
    grid = PROCESSOR.grid(*container.upright)
    work = work_bytes(container, PROCESSOR)
    return File("x", container, PROCESSOR, grid, file_digest(data, PROCESSOR), work, len(data))


FILES = [file_of(image) for image in DRAWN]
ONE, OTHER, TWO, LARGE, LARGE_TOO = range(5)
OPEN = st.tuples(st.just("open"), st.lists(st.integers(0, 4), min_size=1, max_size=4))
OTHERS = st.tuples(st.sampled_from(["read", "done", "close"]), st.integers(0, 30))
CALLS = st.lists(st.one_of(OPEN, OTHERS), max_size=30)


class Stored:
    """A store, with the engine's view of its memory."""

    def __init__(self, fd: int, wait: float) -> None:
        self.places, self.engine = Places(fd), SharedPixels(fd)
        limits = ClientLimits(image_wait=wait)
        self.store = Store(self.places, Totals(create_totals()), limits)

    async def place(self, which: list[int]) -> Held:
        """Who gets it closes it."""
        held = Held(self.store)
        placed = [Placed(0, 1, 1)] * len(which)
        try:
            await held.place([FILES[n] for n in which], placed)
        except BaseException:
            held.close()
            raise
        return held

    def shows(self, held: Held, which: list[int]) -> bool:
        """Whether a sequence that was sent these reads what was drawn."""
        views = [self.engine.view(s.offset, s.height, s.width) for s in held.sent]
        return len(views) == len(which) and all(
            np.array_equal(view, np.asarray(DRAWN[n])) for view, n in zip(views, which, strict=True)
        )

    def known(self, which: int) -> bool:
        return FILES[which].key in self.store._known

    async def all_rest(self) -> None:
        """Until decodes of requests that gave up have ended too: a thread ends what it began."""
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        await self.rest()

    async def rest(self) -> None:
        """Until what has ended has been noticed."""
        for _ in range(3):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def stored(wait: float = 20) -> AsyncIterator[Stored]:
    fd = create(PAGES * PAGE)
    try:
        yield Stored(fd, wait)
    finally:
        os.close(fd)


def play(story: Callable[[Stored], Awaitable[None]], wait: float = 20) -> None:
    async def run() -> None:
        async with stored(wait) as made:
            await story(made)

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_readers_are_the_holders_and_no_place_is_given_out_while_it_is_held(
    calls: list[tuple[str, int | list[int]]],
) -> None:
    async def story(made: Stored) -> None:
        requests: list[tuple[Held, list[int]]] = []
        sequences: list[tuple[Callable[[], None], Held, list[int]]] = []
        for what, of in calls:
            if isinstance(of, list):
                with contextlib.suppress(TooMany, BadRequest):  # where there is no room
                    requests.append((await made.place(of), of))
            elif what == "read" and requests:
                held, which = requests[of % len(requests)]
                sequences.append((held.read(), held, which))
            elif what == "close" and requests:
                requests.pop(of % len(requests))[0].close()
            elif what == "done" and sequences:
                sequences.pop(of % len(sequences))[0]()
            await made.all_rest()
            holders = [(h, w) for h, w in requests] + [(h, w) for _, h, w in sequences]
            count = Counter(FILES[n].key for _, which in holders for n in set(which))
            readers = {key: i.readers for key, i in made.store._known.items()}
            assert {key: n for key, n in readers.items() if n} == count
            assert all(made.shows(*each) for each in holders)
        for held, _ in requests:
            held.close()
        for done, *_ in sequences:
            done()
        await made.all_rest()
        assert len(made.store._unread) == len(made.store._known), "nobody holds any"

    play(story, wait=0.02)


def test_one_image_in_several_parts_is_held_once() -> None:
    async def story(made: Stored) -> None:
        held = await made.place([ONE] * 3)
        assert len({each.offset for each in held.sent}) == 1 and len(held.sent) == 3
        await made.rest()
        (image,) = made.store._known.values()
        assert image.readers == 1
        done = held.read()
        held.close()
        assert image.readers == 1
        done()
        assert image.readers == 0
        with pytest.raises(AssertionError, match="nobody"):
            made.store.leave([image])

    play(story)


def test_images_that_nobody_reads_stay_where_there_would_be_no_room_without_them() -> None:
    async def story(made: Stored) -> None:
        reading = await made.place([LARGE])
        (await made.place([ONE])).close()
        (await made.place([TWO])).close()
        with pytest.raises(TooMany):
            await made.place([LARGE_TOO, OTHER])
        assert made.known(ONE) and made.known(TWO), "dropped in vain"
        decoded = made.store.decoded
        (await made.place([ONE, TWO])).close()
        assert made.store.decoded == decoded and made.shows(reading, [LARGE])
        (await made.place([OTHER])).close()
        assert made.known(TWO) and not made.known(ONE), "the one that was read the longest ago"
        reading.close()

    play(story, wait=1)


def test_who_needs_no_room_passes_who_waits_for_it() -> None:
    async def story(made: Stored) -> None:
        reading = await made.place([LARGE])
        (await made.place([ONE])).close()
        waiting = asyncio.create_task(made.place([LARGE_TOO, OTHER]))
        behind = asyncio.create_task(made.place([TWO]))  # would fit now
        await asyncio.sleep(0.05)
        assert not waiting.done()
        passing = await asyncio.wait_for(made.place([ONE, LARGE, ONE]), limit(2))
        assert made.shows(passing, [ONE, LARGE, ONE])
        assert not waiting.done() and not behind.done(), "who needs room is not overtaken"
        passing.close()
        reading.close()
        for task, which in ((waiting, [LARGE_TOO, OTHER]), (behind, [TWO])):
            held = await task
            assert made.shows(held, which)
            held.close()

    play(story)
