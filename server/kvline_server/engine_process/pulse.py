"""What a rank of several tells the parent whatever its main thread waits for: its process runs."""

from __future__ import annotations

import contextlib
import time

from kvline_server.ipc.messages import Channel, Pulse

PULSE_SECONDS = 0.5


def pulse(parent: Channel) -> None:
    """On a thread of its own."""
    with contextlib.suppress(OSError):
        while True:
            parent.send(Pulse())
            time.sleep(PULSE_SECONDS)
