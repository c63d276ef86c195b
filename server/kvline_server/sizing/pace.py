"""Whether a step is short enough to serve, and what makes it shorter.

In service nobody can tell a step that takes longer than half of the liveness limit from a hung
engine, so a size whose steps do is not validated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from kvline_contract.report import Direction, Knob
from kvline_server.errors import StepTooLong
from kvline_server.ipc.starvation import took
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.sizing.settings import EngineSettings
from kvline_server.worker.step import Step

SAFE = 0.8  # of what would just do: a step's time is not quite in proportion to its rows


def check(
    step: Step,
    run: Callable[[], object],
    limit: float,
    settings: EngineSettings,
    pids: Collection[int],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Raises StepTooLong for a step that takes more than `limit` seconds. It has, and is run once
    more: its first run may have loaded code, and what the node gave to others is left out now,
    whichever rank's process in `pids` waited for a CPU."""
    seconds = took(run, pids, clock)
    if seconds <= limit:
        return
    rows, context = len(step.tokens), int(step.layout.positions.max()) + 1
    what = f"a step of {rows} rows, with a context of {context} tokens, took"
    raise _too_long(what, seconds, limit, _knobs(rows, limit / seconds, settings))


def check_layer(settings: EngineSettings, limit: float) -> None:
    """Raises StepTooLong where a layer of the largest image takes more than `limit` seconds: a pass
    of the encoder is not interrupted within one."""
    images = settings.images
    if images is None or (seconds := images.tokens / settings.encoder_pace) <= limit:
        return
    knobs: tuple[Knob, ...] = ()
    if not images.vision.image:  # else all are of one size
        fitting = max(1, int(images.tokens * SAFE * limit / seconds)) * images.vision.merge**2
        knobs = (Knob("spec.engine.maxImagePatches", Direction.LOWER, fitting),)
    what = f"a layer of an image of {images.patches} patches takes"
    raise _too_long(what, seconds, limit, knobs)


def _too_long(what: str, seconds: float, limit: float, knobs: tuple[Knob, ...]) -> StepTooLong:
    advice = " and ".join(f"{knob.direction} {knob.spec_field}{_to(knob)}" for knob in knobs)
    return StepTooLong(
        f"{what} {seconds:.3g} s; one of more than {limit:g} s would be taken for a hung engine in "
        f"service: {advice or 'leave image out of spec.engine.modalities'}",
        knobs=knobs,
    )


def _knobs(rows: int, share: float, settings: EngineSettings) -> tuple[Knob, ...]:
    """`share`: of the step's time that one may take. A step has maxPrefillTokens rows at most, and
    that may not be below what so many requests need at least."""
    fitting = int(rows * SAFE * share) // PAGE_SIZE * PAGE_SIZE
    # Else it is the context that takes so long.
    if not fitting or fitting < settings.least_rows(1):
        return (Knob("spec.engine.maxModelLen", Direction.LOWER),)
    knobs = [Knob("spec.engine.maxPrefillTokens", Direction.LOWER, fitting)]
    beside = settings.least_rows(0)
    if fitting < settings.max_running_requests + beside:
        knobs[0] = replace(knobs[0], with_next=True)
        knobs.append(Knob("spec.engine.maxRunningRequests", Direction.LOWER, fitting - beside))
    return tuple(knobs)


def _to(knob: Knob) -> str:
    return "" if knob.value is None else f" to {knob.value}"
