"""Writes down what blocks an event loop: a call that waits, and a callback of much CPU time. Wall
time would depend on what else the machine runs."""

from __future__ import annotations

import asyncio
import asyncio.events
import sys
import time
import traceback
from pathlib import Path
from typing import Any

CPU_SECONDS = 0.3  # 100 ms and what debug mode and a shared core add: 114 ms were measured
WAITS = ("subprocess.Popen", "os.system", "socket.getaddrinfo", "socket.connect")


def watch(name: str) -> None:
    file = Path(name)

    def note(what: str) -> None:
        stack = " < ".join(
            f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
            for frame in reversed(traceback.extract_stack(limit=12)[:-2])
        )
        with file.open("a") as out:
            out.write(f"{what}: {stack}\n")

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event not in WAITS or asyncio._get_running_loop() is None:
            return
        if event != "socket.connect" or given[0].gettimeout() != 0:
            note(event)

    run = asyncio.events.Handle._run

    def measured(handle: asyncio.events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        if (used := time.thread_time() - began) > CPU_SECONDS:
            note(f"{used:.3f} s of CPU time in {handle!r}")

    sleep = time.sleep

    def noted(seconds: float) -> None:  # no audit event tells of it before Python 3.13
        if asyncio._get_running_loop() is not None:
            note("time.sleep")
        sleep(seconds)

    time.sleep = noted  # type: ignore[assignment]
    sys.addaudithook(audit)
    asyncio.events.Handle._run = measured  # type: ignore[assignment,method-assign]
    file.write_text("")
