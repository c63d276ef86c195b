"""Run inside the cluster's network: streams without a pause until asked to stop, and keeps
the moments at which they ended. `streaming` runs it beside whatever a test does.

Each request is a connection of its own, so that every endpoint is met as soon as it is one; but the
first thread keeps its connection, as clients with a pool do, until the server closes it. A request
counts as served when its stream ended with the last token and [DONE].
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))

from waiting import limit

TOKENS = 16
BODY = {"prompt": "The capital of France is", "max_tokens": TOKENS, "ignore_eos": True}


def served(host: str, model: str, pool: httpx.Client | None) -> str:
    """Empty when all of the stream came, else what was wrong with it."""
    body = {**BODY, "model": model, "stream": True}
    url = f"http://{host}:8000/v1/completions"
    try:
        if pool is not None:
            answer = pool.post(url, json=body)
        else:
            answer = httpx.post(url, json=body, timeout=limit(60), headers={"Connection": "close"})
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    lines = answer.text.split("\n\n")
    if answer.status_code != 200:
        return f"{answer.status_code}: {lines[0][:200]}"
    ended = "data: [DONE]" in lines and any('"finish_reason":"length"' in line for line in lines)
    return "" if ended else f"a stream that broke off: {lines[-2:]}"


@dataclass
class Streams:
    """Results of the streams, filled when they have stopped."""

    ended: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def streaming(network: Any, host: str, model: str, folder: Path, threads: int) -> Iterator[Streams]:
    """Streams from a service, inside the cluster's network, while the body of `with` runs."""
    stop = folder / "stop"
    words = [sys.executable, __file__, host, model, str(stop), str(threads)]
    running = subprocess.Popen(network.command(words), stdout=subprocess.PIPE, text=True)
    streams = Streams()
    try:
        yield streams
    finally:
        stop.touch()
        result = json.loads(running.communicate(timeout=limit(120))[0])
        streams.ended, streams.failures = result["ended"], result["failures"]


def main(host: str, model: str, stop: str, threads: int) -> None:
    failures: list[str] = []
    ended: list[float] = []

    starter = os.getppid()

    def stream(pool: httpx.Client | None = None) -> None:
        while not Path(stop).exists() and os.getppid() == starter:  # a test that was killed
            wrong = served(host, model, pool)
            ended.append(time.time())
            failures.extend([wrong] if wrong else [])

    kept = (httpx.Client(timeout=limit(60)),)
    running = [threading.Thread(target=stream, args=() if n else kept) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps({"ended": ended, "failures": failures}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
