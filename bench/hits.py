"""The share of prompt tokens that the prefix cache has, on the engine alone with the demo model.

Three ways in which requests come to share: at once, while the first of them computes what they
share, and as chats whose next prompt begins with the last answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import demo_engines
import pool
from record import record, table
from stepping import drained, note

from kvline_server.engine.engine import Engine

SHARED, OWN, ANSWER = 512, 48, 40  # tokens
REQUESTS, CHATS, TURNS = 24, 6, 5


def run() -> None:
    """Counted by the engine, so that one run is exact."""
    engine = demo_engines.make()
    ways: dict[str, Callable[[Engine], tuple[int, int]]] = {
        "at-once": at_once,
        "one-a-step": one_a_step,
        "chats": chats,
    }
    rows = []
    for name, way in ways.items():
        pool.renew(engine)
        cached, asked = way(engine)
        share = 100 * cached / asked
        record(f"prefix-hits-{name}", share, "%", (share, share))
        rows.append([name, str(asked), str(cached), f"{share:.1f}"])
    table("Prompt tokens found in the prefix cache", ["requests", "asked", "found", "%"], rows)


def prompts(seed: int) -> list[list[int]]:
    """Of all requests, which begin alike."""
    rng = random.Random(seed)
    shared = tokens(rng, SHARED)
    return [shared + tokens(rng, OWN) for _ in range(REQUESTS)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def at_once(engine: Engine) -> tuple[int, int]:
    """-> tokens found, tokens asked"""
    made = prompts(1)
    for id, prompt in enumerate(made):
        engine.submit(id, list(prompt), demo_engines.greedy(ANSWER))
    found = drained(engine)
    return sum(found.values()), sum(map(len, made))


def one_a_step(engine: Engine) -> tuple[int, int]:
    made = prompts(2)
    found: dict[int, int] = {}
    for id, prompt in enumerate(made):
        engine.submit(id, list(prompt), demo_engines.greedy(ANSWER))
        note(engine, found)
    found |= drained(engine)
    return sum(found.values()), sum(map(len, made))


def chats(engine: Engine) -> tuple[int, int]:
    """All chats take their next turn at once, with their own answers in the prompt."""
    rng = random.Random(3)
    history = [tokens(rng, OWN) for _ in range(CHATS)]
    cached = asked = 0
    for _ in range(TURNS):
        answers: dict[int, list[int]] = {id: [] for id in range(CHATS)}
        for id, prompt in enumerate(history):
            engine.submit(id, list(prompt), demo_engines.greedy(ANSWER))
            asked += len(prompt)
        cached += sum(drained(engine, answers).values())
        history = [[*old, *answers[id], *tokens(rng, OWN)] for id, old in enumerate(history)]
    return cached, asked
