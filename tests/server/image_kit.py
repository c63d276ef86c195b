"""A tiny model that takes images, requests with them, and the engine with an encoder that records
what it is given."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from engines import mapped
from image_chats import SIDE
from image_files import noise
from scripted import Scripted
from waiting import limit

from kvline_contract.report import Effective
from kvline_server.engine.encoding import Bounds, Encoding
from kvline_server.engine.engine import Engine
from kvline_server.engine_process.listen import listen
from kvline_server.engine_process.loop import EngineProcess
from kvline_server.http.image_store import Store
from kvline_server.http.images import open_images
from kvline_server.images.digests import digest
from kvline_server.ipc import messages
from kvline_server.ipc.messages import Channel, Released, Submit
from kvline_server.ipc.pixels import PAGE, Places, create
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.device import cpu_device
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.options.arguments import EngineArguments
from kvline_server.options.clients import ClientLimits
from kvline_server.options.options import Options
from kvline_server.parallel.executor import Local
from kvline_server.worker.encoder import Image
from kvline_server.worker.worker import Worker

IMAGE, LARGE = noise(16, 24, 1), noise(64, 64, 4)  # of one page, and of three
Story = Callable[["Pictured"], Awaitable[None]]
EFFECTIVE = Effective(512, 8, 64, 20, 0, 16, 64, max_images_per_request=4, max_image_patches=256)


class Pictured(Scripted):
    """The HTTP part of a server that takes images."""

    def __init__(self, folder: Path, pages: int = 64, **limits: Any) -> None:
        super().__init__(folder, vocabulary=read_config(folder).vocabulary)
        self.pixels_fd = create(pages * PAGE)
        self.places = Places(self.pixels_fd)
        self.limits = ClientLimits(**limits)
        self.service.bodies.limits = self.limits
        self.store = Store(self.places, self.admission.totals, self.limits)
        images = open_images(folder, self.tokens, EFFECTIVE, self.store)
        self.service.generator.images = images

    async def ask(self, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Pictured]:
        async with super().open():
            yield self
        os.close(self.pixels_fd)

    def read(self) -> int:
        """Bytes that a request, a sequence or decoding needs."""
        unread = sum(-(-i.height * i.width * 3 // PAGE) for i in self.store._unread.values())
        return self.places.used - unread * PAGE

    async def settled(self) -> None:
        """Once nobody needs any pixels."""
        end = time.monotonic() + limit(20)
        while self.read() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert self.read() == 0


class Recording:
    """An encoder whose rows say which pixels they are of: what is decoded depends on these."""

    def __init__(self, decoder: Decoder, passes: int = 1) -> None:
        self.table = decoder.weights.embedding[decoder.config.vocabulary :]
        self.passes, self.left = passes, 0
        self.begun: list[list[np.ndarray]] = []
        self.fails: Exception | None = None

    def begin(self, given: Sequence[Image], rows: np.ndarray) -> list[int]:
        if self.fails is not None:
            raise self.fails
        if wrong := [at for at, each in enumerate(given) if digest(each.pixels) != each.digest]:
            return wrong
        images = [each.pixels for each in given]
        self.begun.append([image.copy() for image in images])
        counts = [i.shape[0] * i.shape[1] // SIDE**2 for i in images]
        assert sum(counts) == len(rows)
        starts = itertools.accumulate(counts, initial=0)
        for image, start, count in zip(images, starts, counts, strict=False):
            seed = int.from_bytes(image.tobytes()[:8] + bytes([image.sum() % 251]), "big")
            made = torch.Generator().manual_seed(seed % 2**63)
            values = torch.randn((count, self.table.shape[1]), generator=made)
            self.table[torch.from_numpy(rows[start : start + count])] = values
        self.left = self.passes
        return []

    def run(self, layers: int) -> bool:
        self.left -= 1
        return self.left <= 0


def engine(folder: Path, cached: int = 64, passes: int = 1) -> tuple[Engine, Recording]:
    config, kernels, step = read_config(folder), TorchKernels(), 64
    weights = load_weights(SafetensorsSource(folder), config, kernels, encoded=cached)
    made = Decoder(config, weights, 512, kernels, image_rows=step)
    arena = mapped(made, 512, 200)
    executor = Local(Worker(made, arena, step, 8, 8), cpu_device(None, os.getpid()))
    recording = Recording(made, passes)
    encoding = Encoding(recording, Bounds(cached, cached), step, config.vocabulary)
    eos, axes = config.eos_token_ids, bool(config.rope.axes)
    return Engine(executor, 8, step, 512, eos, encoding=encoding, axes=axes), recording


class Served:
    """An engine that serves on a thread, as its process does, for one HTTP process."""

    def __init__(self, made: Engine, pixels_fd: int) -> None:
        self.engine, self.stopped = made, False
        self.failure: BaseException | None = None
        self.here, line = socket.socketpair()
        self.parent, control = socket.socketpair()
        options = Options(Path(), Path())
        arguments = EngineArguments(
            options=options, control_fd=-1, http_fds=[line.detach()], root=0, pixel_fds=[pixels_fd]
        )
        self.process = EngineProcess(arguments, Channel(control))
        (client,) = self.process.http
        hear = partial(self.process._hear_http, client)
        serving = threading.Thread(target=self._serve)
        self.threads = [listen(client, "a client", hear, self.process.parent), serving]
        serving.start()

    def _serve(self) -> None:
        try:
            while not self.stopped:
                self.process._take(self.engine)
                self.process._publish(self.engine.step())
        except BaseException as error:
            self.failure = error
            self.process.http[0].connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stopped = True
        for thread in self.threads:
            thread.join()
        for connection in (self.parent, self.process.parent.connection):
            connection.close()
        self.process.http[0].connection.close()


@asynccontextmanager
async def served(folder: Path, pages: int = 64, **of: Any) -> AsyncIterator[tuple[Pictured, Any]]:
    """-> the HTTP part, and the recording encoder of the engine behind it"""
    made, recording = engine(folder, **of)
    http = Pictured(folder, pages)
    behind = Served(made, http.pixels_fd)
    try:
        await http.client.connect(behind.here, 16)
        async with http.http:
            yield http, recording
        if http.client._writer is not None:
            http.client._writer.close()
        await http.client.lost.wait()
    finally:
        behind.here.close()
        behind.close()
        os.close(http.pixels_fd)


def play(folder: Path, story: Story, **of: Any) -> None:
    async def run() -> None:
        async with Pictured(folder, **of).open() as http:
            await story(http)

    asyncio.run(run())


def release(http: Pictured, sent: Submit) -> None:
    http._writer.write(messages.encode(Released([sent.id])))


async def answered(http: Pictured, body: dict[str, Any]) -> tuple[Submit, dict[str, Any]]:
    asking = asyncio.create_task(http.ask(body))
    sent = await http.asked()
    http.send(sent.id, [65])
    answer = (await asking).json()
    if sent.images:
        release(http, sent)
    return sent, answer


async def refusal(http: Pictured, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = await http.ask(body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error
