"""Time a token of few requests at once, streamed over HTTP."""

from __future__ import annotations

import client
import numpy as np
import offline
import torch
from client import Asked
from record import record, table
from serving import served
from shapes import SHAPES

AT_ONCE = (1, 8, 32)
PROMPT, OUTPUT, ROUNDS = 256, 384, 3


def run() -> None:
    """KVLINE_BENCH_MODELS selects models."""
    rows = []
    for name in offline.models():
        with served(name) as port:
            for count in AT_ONCE:
                found = [measure(port, name, count, turn) for turn in range(ROUNDS)]
                gpu, best = torch.cuda.get_device_name(0), min(found)
                record(f"decode-{count}-{name}", best, "ms", (best, max(found)), gpu)
                rows.append([name, str(count), f"{best:.3f}", f"{max(found):.3f}"])
                print(rows[-1], flush=True)
    head = ["model", "requests at once", "ms a token", "worst round"]
    table(f"Prompts of {PROMPT} tokens, {OUTPUT} more streamed over HTTP", head, rows)


def measure(port: int, name: str, count: int, turn: int) -> float:
    """Milliseconds between two tokens of a request, the mean over all of them."""
    known = SHAPES[name].vocabulary - 20
    first = 7919 * (100 * turn + count)
    asked = [
        Asked([10 + (first + 31 * id + 17 * at) % known for at in range(PROMPT)], OUTPUT)
        for id in range(count)
    ]
    answers = client.play(port, asked, stream=True, temperature=0.6)
    # From the first event to the last: one event may carry several tokens.
    return float(np.mean([1e3 * (a.pieces[-1] - a.pieces[0]) / (OUTPUT - 1) for a in answers]))
