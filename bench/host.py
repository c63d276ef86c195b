"""The host's time of a step without a model: the requests of r512, of which a device that answers
at once runs 512. CPU time, best of some runs, and how often garbage was collected meanwhile.

Two checkouts are compared by running it in each, in turns.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import numpy as np
from record import record, table
from workloads import WORKLOADS

from kvline_server.engine.engine import Engine
from kvline_server.engine_process.preamble import collect_rarely
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.worker.step import Results, Step

RUNNING, PAGES, STEP_TOKENS, VOCABULARY, ROUNDS = 512, 62_000, 8192, 150_000, 5
SAMPLED = 77  # a token that ends nothing


@dataclass(frozen=True, slots=True)
class Done:
    count: int

    def wait(self) -> Results:
        return Results(np.full(self.count, SAMPLED, dtype=np.int64), None, None)


class Instant:
    """An executor of no device."""

    depth, windows, pages = 1, (0,), (PAGES,)

    def launch(self, step: Step) -> Done:
        return Done(len(step.sampled_requests))


def run() -> None:
    collected = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal collected
        collected += phase == "start"

    requests = WORKLOADS["r512"].make(VOCABULARY)
    collect_rarely()
    gc.callbacks.append(note)
    times = []
    for _ in range(ROUNDS):
        engine = Engine(Instant(), RUNNING, STEP_TOKENS, STEP_TOKENS, ())  # type: ignore[arg-type]
        began = time.process_time()
        for id, (prompt, output) in enumerate(requests):
            params = SamplingParams(output, temperature=0.6, ignore_eos=True, seed=id)
            engine.submit(id, list(prompt), params)
        while not engine.idle:
            engine.step()
        times.append(1e6 * (time.process_time() - began) / engine.steps)
    gc.callbacks.remove(note)
    best = min(times)
    record("host-us-no-model", best, "us", (best, max(times)))
    head = ["us a step", "worst run", "steps", "collections a run"]
    row = [f"{best:.0f}", f"{max(times):.0f}", str(engine.steps), f"{collected / ROUNDS:.0f}"]
    table(f"r512's requests, {RUNNING} at once, without a model", head, [row])
