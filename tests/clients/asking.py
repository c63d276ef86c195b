"""Asks a client for a feature of a running server, and checks what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import forced_server
import httpx
import pytest
from driven import Driven
from features import FEATURES
from forced_server import HELD, KEY, Served
from tested_clients import Client
from waiting import limit


class Asking:
    def __init__(self, served: Served, driven: dict[str, Driven]) -> None:
        self.served = served
        self._driven = driven

    def check(self, client: Client, feature: str) -> None:
        with full(self.served) if feature == "full" else nullcontext():
            value = self._started(client).ask(feature)
        FEATURES[feature].check(value, self.served)

    def _started(self, client: Client) -> Driven:
        """Its process; another one where a case has ended it."""
        found = self._driven.get(client.name)
        if found is None or found.process.poll() is not None:
            found = self._driven[client.name] = Driven(client, self.served.url)
            assert set(found.ask("")) == set(client.features), "the cases are not the table's"
        return found


@contextmanager
def full(served: Served) -> Iterator[None]:
    """While it can take no other sequence."""
    served.server.rests()
    body: dict[str, Any] = {"model": "tiny", "prompt": ["x"] * HELD, "stream": True}
    body |= {"max_tokens": forced_server.CONTEXT - 8, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{served.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=limit(30),
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()  # held: the response closes with it
        next(lines)
        yield
    served.server.rests()


def cases(clients: Iterable[Client]) -> list[Any]:
    """Parameters of a test."""
    return [
        pytest.param(client, feature, id=f"{client.name}-{feature}")
        for client in clients
        for feature in client.features
    ]
