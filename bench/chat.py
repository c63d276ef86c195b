"""What chats see of a server, at rates that rise until its throughput does not.

Poisson arrivals with a shared prefix. A gap is the time between two pieces of one stream; those of
all streams are pooled, so that one long wait counts as what it is and is in no mean. Throughput is
the tokens that came in the second half of a rate's arrivals.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import demo_engines
import numpy as np
import offline
import raw_http
import rivals
import serving
import torch
from raw_http import Answered, Asked
from record import record, table
from shapes import SHAPES

STEP = 1.5  # from one rate to the next
GROWTH = 1.05  # a rate whose throughput grew by less than this is past the knee
MOST = 14  # rates
CUTS = (50, 99, 99.9, 100)  # of gaps


@dataclass(frozen=True, slots=True)
class Load:
    shared: int  # tokens that all prompts begin with
    own: tuple[int, int]
    output: tuple[int, int]
    rate: float  # the first, requests a second
    first: float  # seconds to the first token within which a request is good
    each: float  # seconds a further token, on the mean of its answer


GPU = Load(512, (128, 1024), (64, 512), 12.0, 0.2, 0.02)
CPU = Load(64, (16, 64), (8, 32), 0.5, 2.0, 0.2)


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one rate."""

    rate: float
    tokens: float  # a second
    refused: int
    good: float  # share of all that were asked
    firsts: np.ndarray  # ms
    gaps: np.ndarray  # ms

    def row(self) -> list[str]:
        firsts = [np.percentile(self.firsts, q) for q in (50, 99)]
        gaps = [np.percentile(self.gaps, q) for q in CUTS]
        ms = [f"{x:.1f}" for x in (*firsts, *gaps)]
        good = f"{100 * self.good:.0f}"
        return [f"{self.rate:.3g}", f"{self.tokens:.0f}", str(self.refused), *ms, good]


def run() -> None:
    """KVLINE_BENCH_DEVICE=cpu: small chats on the demo model. KVLINE_BENCH_ENGINES and
    KVLINE_BENCH_MODELS choose; KVLINE_BENCH_SECONDS is each rate's time (30)."""
    seconds = float(os.environ.get("KVLINE_BENCH_SECONDS", "30"))
    if os.environ.get("KVLINE_BENCH_DEVICE") == "cpu":
        with on_cpu() as port:
            show("kvline", "smollm2", climb(port, CPU, 49_000, seconds), CPU, seconds, None)
        return
    gpu = torch.cuda.get_device_name(0)
    for name in offline.models("llama8b"):
        for engine in rivals.engines():
            with rivals.served(engine, name) as port:
                rates = climb(port, GPU, SHAPES[name].vocabulary, seconds)
            show(engine, name, rates, GPU, seconds, gpu)


@contextlib.contextmanager
def on_cpu() -> Iterator[int]:
    port, internal = serving.free_port(), serving.free_port()
    command = [
        sys.executable,
        "-m",
        "kvline_server",
        "serve",
        "--model",
        str(demo_engines.folder()),
    ]
    command += ["--served-name", "m", "--device", "cpu", "--memory", "3Gi", "--port", str(port)]
    command += ["--threads", str(demo_engines.THREADS), "--internal-port", str(internal)]
    with serving.running(command, internal):
        yield port


def climb(port: int, load: Load, vocabulary: int, seconds: float) -> list[Seen]:
    """Rates up to the first that brings no more, or to MOST."""
    out: list[Seen] = []
    for number in range(MOST):
        rate = load.rate * STEP**number
        answers = raw_http.play(
            port, arrivals(load, vocabulary, rate, seconds), True, True, temperature=0.6
        )
        out.append(seen(answers, load, rate, seconds))
        print(out[-1].row(), flush=True)
        if number and out[-1].tokens < GROWTH * out[-2].tokens:
            break
    return out


def arrivals(load: Load, vocabulary: int, rate: float, seconds: float) -> list[Asked]:
    rng = random.Random(int(1000 * rate))
    most = vocabulary - 10
    shared = [rng.randrange(10, most) for _ in range(load.shared)]
    out, at = [], 0.0
    while at < seconds:
        own = [rng.randrange(10, most) for _ in range(rng.randint(*load.own))]
        out.append(Asked(shared + own, rng.randint(*load.output), at))
        at += rng.expovariate(rate)
    return out


def seen(answers: list[Answered], load: Load, rate: float, seconds: float) -> Seen:
    whole = [a for a in answers if a.pieces]
    half = seconds / 2
    tokens = sum(
        a.output / len(a.pieces) * sum(half <= at < seconds for at in a.pieces) for a in whole
    )
    good = sum(a.first <= load.first and each(a) <= load.each for a in whole)
    gaps = [later - at for a in whole for at, later in itertools.pairwise(a.pieces)]
    return Seen(
        rate,
        tokens / (seconds - half),
        len(answers) - len(whole),
        good / len(answers),
        1e3 * np.array([a.first for a in whole]),
        1e3 * np.array(gaps),
    )


def each(answer: Answered) -> float:
    """The mean of an answer's gaps, in seconds."""
    return (answer.pieces[-1] - answer.pieces[0]) / max(1, answer.output - 1)


def show(
    engine: str, name: str, rates: list[Seen], load: Load, seconds: float, gpu: str | None
) -> None:
    for one in rates:
        cuts = [float(np.percentile(one.gaps, q)) for q in CUTS]
        label = f"{one.rate:.3g}-{engine}-{name}"
        record(f"chat-gap-p99-ms-{label}", cuts[1], "ms", (cuts[0], cuts[3]), gpu)
        record(f"chat-tokens-{label}", one.tokens, "tokens/s", (one.tokens,) * 2, gpu)
    past = len(rates) > 1 and rates[-1].tokens < GROWTH * rates[-2].tokens
    knee = rates[-2] if past else rates[-1]
    record(f"chat-knee-{engine}-{name}", knee.rate, "requests/s", (knee.rate,) * 2, gpu)
    head = ["asked/s", "tokens/s", "refused", "first p50 ms", "p99", "gap p50 ms", "p99", "p99.9"]
    head += ["longest", "good %, by means"]
    title = f"{engine}, {name}: chat, {seconds:.0f} s a rate; good: first <= {load.first:g} s, "
    title += f"mean gap <= {1e3 * load.each:.0f} ms"
    table(title, head, [one.row() for one in rates])
    where = "knee" if past else "no knee up to"
    print(f"{where}: {knee.rate:.3g} requests/s, {knee.tokens:.0f} tokens/s", flush=True)
