"""Threads of a rank's process that read from another process: none ends without a word."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from kvline_contract.exits import ExitCode
from kvline_contract.report import Termination
from kvline_server.errors import ServerError
from kvline_server.ipc.messages import Channel, Message, Progress


def listen(
    source: Channel,
    name: str,
    handle: Callable[[Message], None],
    parent: Channel,
    end: ExitCode | None = None,
) -> threading.Thread:
    """Starts one that handles each message of `source`. At its end this process ends too, where
    there is a code for that. Where a message is invalid, or handling it fails, the process tells
    its parent why and ends: deaf, it would seem idle."""

    def read() -> None:
        try:
            for message in source.receive():
                handle(message)
        except Exception as error:
            failure = _failure(error, name)
            with contextlib.suppress(OSError):
                parent.send(Progress(failure=failure))
            os._exit(failure.code)
        if end is not None:
            os._exit(int(end))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _failure(error: Exception, name: str) -> Termination:
    if isinstance(error, ServerError):
        return Termination.of(error.code, f"{name} sent {error}")
    text = f"a message of {name} could not be handled: {type(error).__name__}: {error}"
    return Termination.of(ExitCode.ENGINE_DIED, text)
