"""Run inside the cluster's network, beside what a test does: one long stream, a crowd of clients of
which each asks again a second after a 429, or prompts of distinct lengths. Prints JSON at the end.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))

from waiting import limit

JSON = {"Content-Type": "application/json"}


def long_stream(host: str, model: str, seconds: str, most: str) -> None:
    """A stream as long as the server's pace makes of `seconds`, of so many tokens at most, and how
    it ended."""
    pace, _ = _stream(host, model, 64)
    tokens = min(max(64, int(64 / pace * float(seconds))), int(most))
    print(json.dumps({"tokens": tokens}), flush=True)
    took, ended = _stream(host, model, tokens)
    end = {"seconds": took, "ended": ended, "tokens": tokens, "at": time.time()}
    print(json.dumps(end), flush=True)


def _stream(host: str, model: str, tokens: int) -> tuple[float, str]:
    """Seconds, and the last line but one: the finish reason or an error."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, 8000, timeout=limit(120))
    body = {"model": model, "prompt": "Once", "max_tokens": tokens, "stream": True}
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), JSON
        )
        lines = [x for x in connection.getresponse().read().decode().split("\n\n") if x]
    except (OSError, http.client.HTTPException) as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    good = lines[-1:] == ["data: [DONE]"] and '"finish_reason":"length"' in "".join(lines[-3:])
    return time.monotonic() - began, "length" if good else " ".join(lines[-2:])[:500]


def storm(host: str, model: str, stop: str, clients: str) -> None:
    """Answers by status, of clients that never give up."""
    seen: Counter[str] = Counter()
    starter = os.getppid()

    def client() -> None:
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": 16, "ignore_eos": True})
        while not Path(stop).exists() and os.getppid() == starter:
            connection = http.client.HTTPConnection(host, 8000, timeout=limit(120))
            try:
                connection.request("POST", "/v1/completions", body, JSON)
                answer = connection.getresponse()
                answer.read()
                seen[str(answer.status)] += 1
                if answer.status == 429:
                    time.sleep(int(answer.getheader("retry-after") or 1))
            except (OSError, http.client.HTTPException) as error:
                seen[type(error).__name__] += 1
            finally:
                connection.close()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(int(clients))]
    for thread in threads:
        thread.start()
    while not Path(stop).exists() and os.getppid() == starter:
        time.sleep(0.2)
    end = time.monotonic() + limit(120)
    for thread in threads:  # what the server admitted is answered
        thread.join(max(0.0, end - time.monotonic()))
    print(json.dumps(seen))


def lengths(host: str, model: str, first: str, step: str) -> None:
    """Answers by status, to prompts of `first`, `first` + `step` and so on, up to 256 tokens."""
    seen: Counter[str] = Counter()
    for length in range(int(first), 257, int(step)):
        body = json.dumps({"model": model, "prompt": [length] * length, "max_tokens": 2})
        connection = http.client.HTTPConnection(host, 8000, timeout=limit(120))
        connection.request("POST", "/v1/completions", body, JSON)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        seen[str(answer.status)] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    modes: dict[str, Callable[..., None]] = {
        "stream": long_stream,
        "storm": storm,
        "lengths": lengths,
    }
    modes[sys.argv[1]](*sys.argv[2:])
