"""The real HTTP process with memory for pixels, and this test as its parent and its engine."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from image_chats import chat, part, text
from image_files import noise
from image_kit import EFFECTIVE
from servers import launch_config
from waiting import limit

from kvline_contract.launch import EngineOptions, Images
from kvline_contract.report import Effective
from kvline_server.ipc.messages import (
    Channel,
    Delta,
    Deltas,
    EdgeBeat,
    Message,
    Released,
    Serve,
    Submit,
)
from kvline_server.ipc.pixels import PAGE, SharedPixels
from kvline_server.options.arguments import GrammarService
from kvline_server.options.clients import ClientLimits
from kvline_server.options.options import Options
from kvline_server.parent.children import Child, listen, share_pixels, start_http

pytestmark = pytest.mark.process
TEXT_ALONE = replace(EFFECTIVE, max_images_per_request=None, max_image_patches=None)


@dataclass
class Started:
    child: Child
    port: int
    engine: Channel
    pixels: list[int]
    submitted: queue.SimpleQueue[Submit]

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=limit(60))

    def libraries(self) -> str:
        return Path(f"/proc/{self.child.process.pid}/maps").read_text()


@contextmanager
def started(model: Path, folder: Path, images: Images | None, of: Effective) -> Iterator[Started]:
    """A process that serves, and whose sequences end with their first token."""
    launch = launch_config(model, EngineOptions(images=images))
    (folder / "launch.json").write_text(launch.dumps())
    limits, ready = ClientLimits(pixel_bytes=64 * PAGE), threading.Event()
    listeners = listen("127.0.0.1", 0, 1)
    port = listeners[0].getsockname()[1]
    pixels = share_pixels(launch, limits, 1)
    options = Options(folder / "launch.json", folder)
    service = GrammarService(folder / "none", -1)
    (child,) = start_http(options, limits, listeners, service, pixels)
    here, line = socket.socketpair()
    engine, submitted = Channel(here), queue.SimpleQueue[Submit]()

    def heard(message: Message) -> None:
        if isinstance(message, EdgeBeat) and message.ready and message.connected:
            ready.set()

    def answer() -> None:
        for message in engine.receive():
            if isinstance(message, Submit):
                submitted.put(message)
                engine.send(Deltas([Delta(message.id, [65], "stop")]))
                if message.images:
                    engine.send(Released([message.id]))

    answering = threading.Thread(target=answer)
    try:
        child.follow(heard)
        child.hand(line)
        child.tell(Serve(of, 4096, None))
        assert ready.wait(limit(60)), child.process.poll()
        answering.start()
        yield Started(child, port, engine, pixels, submitted)
    finally:
        child.kill()
        here.shutdown(socket.SHUT_RDWR)
        if answering.is_alive():
            answering.join()
        here.close()
        for connection in (child.channel.connection, *child.others, *listeners):
            connection.close()
        for file in pixels:
            os.close(file)


def test_the_engine_reads_what_the_process_decoded(image_model: Path, tmp_path: Path) -> None:
    with started(image_model, tmp_path, Images.REQUIRED, EFFECTIVE) as server:
        for seed in range(40):  # more than fit at once
            drawn = noise(64, 64, seed)
            answer = server.ask(chat(text("a"), part(drawn), seed=seed))
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 64
            (image,) = server.submitted.get().images
            view = SharedPixels(server.pixels[0]).view(image.offset, image.height, image.width)
            assert np.array_equal(view, np.asarray(drawn))
        body = chat(
            text("a"), {"type": "image_url", "image_url": {"url": "data:" + "x" * 3_000_000}}
        )
        answer = server.ask(body)
        assert answer.status_code == 400, "a body of more than a text's 2 MiB is read"
        assert answer.json()["error"]["param"] == "messages[1].content[1].image_url"
        assert "_imaging" in server.libraries()


def test_text_alone_takes_no_decoder_and_says_why_it_takes_no_image(
    image_model: Path, tmp_path: Path
) -> None:
    """Memory that a model without an encoder on this device may have asked for changes nothing."""
    for images in (None, Images.IF_SERVED):
        folder = tmp_path / str(images)
        folder.mkdir()
        with started(image_model, folder, images, TEXT_ALONE) as server:
            answer = server.ask(chat(text("a"), part(noise(8, 8))))
            assert answer.status_code == 400
            assert "this server takes text alone" in answer.json()["error"]["message"]
            assert server.ask(chat(text("a"))).status_code == 200
            assert server.submitted.get().images == []
            assert "_imaging" not in server.libraries()
