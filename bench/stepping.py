"""Steps of an engine, which note what each request found in the prefix cache, and its answer."""

from __future__ import annotations

from kvline_server.engine.engine import Engine


def drained(engine: Engine, answers: dict[int, list[int]] | None = None) -> dict[int, int]:
    """Runs all to their end. -> tokens found for each request"""
    found: dict[int, int] = {}
    while not engine.idle:
        note(engine, found, answers)
    return found


def note(
    engine: Engine, found: dict[int, int], answers: dict[int, list[int]] | None = None
) -> None:
    """A step."""
    for output in engine.step():
        sequence = output.sequence
        found[sequence.id] = sequence.cached
        if answers is not None:
            answers[sequence.id].extend(output.tokens)
