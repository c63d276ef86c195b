"""A model that always outputs 7, for tests of the scheduler alone."""

from __future__ import annotations

from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.work import Work


def advance(scheduler: Scheduler, work: list[Work], done: list[int]) -> None:
    """One step of it; sequences end at max_tokens, and their ids are `done`."""
    scheduler.advance(work)
    for w in work:
        if w.start + w.rows == w.sequence.length:
            scheduler.confirm(w.sequence, w.sequence.length)
            w.sequence.tokens.append(7)
            if w.sequence.length - w.sequence.prompt_length >= w.sequence.params.max_tokens:
                scheduler.remove(w.sequence)
                done.append(w.sequence.id)
