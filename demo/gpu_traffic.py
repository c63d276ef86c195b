"""One short completion after another through a Service, while a step does something to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from itertools import pairwise
from types import TracebackType
from urllib.parse import urlsplit

PAUSE = 0.1
BODY = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 1, "ignore_eos": True}
STREAM = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 16, "ignore_eos": True, "stream": True}


class Traffic:
    """`answered` has when each answer was whole, `failed` when and how each other request ended."""

    def __init__(self, url: str, model: str, patient: bool = False, stream: bool = False) -> None:
        """`patient`: waits for each answer, so that a failure is the server's. Otherwise it is the
        next request that matters: a node rejects one connection a second and drops the others
        (icmp_ratelimit), which are then tried again a second later."""
        self.host = urlsplit(url).netloc
        self.connect_seconds, self.answer_seconds = (60.0, 60.0) if patient else (0.25, 2.0)
        self.body = json.dumps({**(STREAM if stream else BODY), "model": model}).encode()
        self.answered: list[float] = []
        self.failed: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            wrong = self._ask()
            now = time.monotonic()
            if wrong:
                self.failed.append((now, wrong))
            else:
                self.answered.append(now)

    def _ask(self) -> str:
        """Empty when the answer is whole, else what was wrong. A connection of its own, so that it
        goes to a pod that serves now."""
        connection = http.client.HTTPConnection(self.host, timeout=self.connect_seconds)
        try:
            connection.connect()
            connection.sock.settimeout(self.answer_seconds)
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", self.body, kind)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if answer.status == 200 and ("[DONE]" in text or '"completion_tokens"' in text):
            return ""
        return f"{answer.status}: {text[-200:]!r}"

    def gap(self) -> float:
        """The longest time without an answer."""
        return max((b - a for a, b in pairwise(self.answered)), default=float("inf"))

    def summary(self) -> str:
        return f"{len(self.answered)} requests answered, {len(self.failed)} failed"
