"""Time a token of few requests at once, streamed over HTTP; of more where a model has experts or
recurrent layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import offline
import peers
import raw_http
import torch
from raw_http import Asked
from reads import BANDWIDTH, decode_ms, experts_ms, hybrid_ms
from record import record, table
from serving import served
from shapes import SHAPES

from kvline_server.model.config import ModelConfig

AT_ONCE, AT_ONCE_OF_MORE = (1, 8, 32), (1, 64, 256)
PROMPT, OUTPUT, ROUNDS = 256, 384, 3


def run() -> None:
    """KVLINE_BENCH_MODELS selects models."""
    rows, shares = [], []
    for name in offline.models():
        shape, label = SHAPES[name], peers.label(name)
        with served(name) as port:
            for count in AT_ONCE if plain(shape) else AT_ONCE_OF_MORE:
                found = [measure(port, name, count, turn) for turn in range(ROUNDS)]
                gpu, best = torch.cuda.get_device_name(0), min(found)
                record(f"decode-{count}-{label}", best, "ms", (best, max(found)), gpu)
                rows.append([label, str(count), f"{best:.3f}", f"{max(found):.3f}"])
                print(rows[-1], flush=True)
                context = PROMPT + OUTPUT // 2
                if shape.recurrent is not None and "H200" in gpu:
                    least = hybrid_ms(shape, count, context)
                    over = best / least
                    record(f"decode-floor-{count}-{label}", over, "ratio", (over, over), gpu)
                    shares.append([label, str(count), "", "", f"{least:.3f}", f"{over:.2f}"])
                elif shape.experts is not None and "H200" in gpu:
                    read = experts_ms(shape, shape.experts, count)
                    share = read / best
                    record(f"experts-share-{count}-{label}", share, "ratio", (share, share), gpu)
                    least = decode_ms(shape, shape.experts, count, context)
                    over = best / least
                    record(f"decode-floor-{count}-{label}", over, "ratio", (over, over), gpu)
                    cells = (f"{read:.3f}", f"{share:.3f}", f"{least:.3f}", f"{over:.2f}")
                    shares.append([label, str(count), *cells])
    head = ["model", "requests at once", "ms a token", "worst round"]
    table(f"Prompts of {PROMPT} tokens, {OUTPUT} more streamed over HTTP", head, rows)
    if shares:
        head = ["model", "requests at once", "experts ms", "of its time", "all ms", "of all"]
        title = "Reading the experts' weights alone, and all that is read"
        table(f"{title}, at {BANDWIDTH / 1e12:.1f} TB/s of a GPU", head, shares)


def plain(shape: ModelConfig) -> bool:
    return shape.experts is None and shape.recurrent is None


def measure(port: int, name: str, count: int, turn: int) -> float:
    """Milliseconds between two tokens of a request, the mean over all of them."""
    known = SHAPES[name].vocabulary - 20
    first = 7919 * (100 * turn + count)
    asked = [
        Asked([10 + (first + 31 * id + 17 * at) % known for at in range(PROMPT)], OUTPUT)
        for id in range(count)
    ]
    if count > max(AT_ONCE):  # computing the prompts takes time: they come from the prefix cache
        raw_http.play(port, [replace(one, output=1) for one in asked], stream=True)
    answers = raw_http.play(port, asked, stream=True, temperature=0.6)
    # From the first event to the last: one event may carry several tokens.
    return float(np.mean([1e3 * (a.pieces[-1] - a.pieces[0]) / (OUTPUT - 1) for a in answers]))
