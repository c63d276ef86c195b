"""What the routes share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from importlib.metadata import version

from kvline_server.grammars.compiler import Compiler
from kvline_server.http.admission import Admission
from kvline_server.http.body import MAX_BODY_BYTES, Bodies
from kvline_server.http.errors import NotFound
from kvline_server.http.generate import Generator, RequestLimits

VERSION = version("kvline")


@dataclass(slots=True)
class Service:
    generator: Generator
    admission: Admission
    bodies: Bodies
    limits: RequestLimits
    started: int = field(default_factory=lambda: int(time.time()))
    compiler: Compiler | None = None  # of grammars
    root: str = ""  # the model's repository on the hub, where it comes from there
    rendering: asyncio.Semaphore = field(init=False)  # as many chats as processes render

    def __post_init__(self) -> None:
        chat = self.generator.chat
        self.rendering = asyncio.Semaphore(chat.processes if chat is not None else 1)

    @property
    def largest_chat(self) -> int:
        """Bytes of a body that has one."""
        taken = self.generator.images is not None
        return self.bodies.limits.image_body_bytes if taken else MAX_BODY_BYTES

    def check_model(self, name: str) -> None:
        if name != self.limits.served_name:
            raise NotFound(
                f"model: this server serves {self.limits.served_name!r}", "model", "model_not_found"
            )
