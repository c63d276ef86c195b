"""Output tokens a second with n-gram drafts, of those without, on the same model: for text that
repeats its prompt, where drafts pay, and for text sampled behind random tokens, where none do. (A
greedy model falls into repeating itself there.)"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import demo_engines
import pool
from record import ROOT, record, table

from kvline_contract.launch import MAX_DRAFT_TOKENS
from kvline_server.engine.engine import Engine
from kvline_server.http.tokens import Tokens
from kvline_server.ipc.sampling_params import SamplingParams

ROUNDS = 3
PASSAGE, OUTPUT = 96, 96  # tokens
PROMPTS = 4


def repeated() -> list[list[int]]:
    """A passage and its beginning once more, which the model goes on with."""
    ids = Tokens(demo_engines.folder()).encode((ROOT / "LICENSE").read_text())
    passages = [ids[at : at + PASSAGE] for at in range(200, 200 + PROMPTS * PASSAGE, PASSAGE)]
    return [passage * 2 + passage[:8] for passage in passages]


def unrelated() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(10, 49_000) for _ in range(2 * PASSAGE)] for _ in range(PROMPTS)]


def play(
    engine: Engine, prompts: list[list[int]], at_once: int, temperature: float = 0.0
) -> tuple[float, list[list[int]]]:
    """-> seconds, and the answers; so many requests run at once."""
    pool.renew(engine)
    out: list[list[int]] = [[] for _ in prompts]
    left, running = list(enumerate(prompts))[::-1], 0
    started = time.perf_counter()
    while left or running:
        while left and running < at_once:
            id, prompt = left.pop()
            params = SamplingParams(OUTPUT, temperature, seed=id, ignore_eos=True)
            engine.submit(id, list(prompt), params)
            running += 1
        for output in engine.step():
            out[output.sequence.id] += output.tokens
            running -= output.finish is not None
    return time.perf_counter() - started, out


def pairs(
    plain: Engine, drafting: Engine, prompts: list[list[int]], at_once: int, temperature: float
) -> Iterator[tuple[float, float]]:
    """In either order, by turns."""
    for number in range(ROUNDS):
        sides = [plain, drafting] if number % 2 == 0 else [drafting, plain]
        times = {
            engine is drafting: play(engine, prompts, at_once, temperature) for engine in sides
        }
        (one, want), (other, got) = times[False], times[True]
        same = sum(a == b for a, b in zip(got, want, strict=True))
        print(f"  plain {one:.1f} s, drafts {other:.1f} s, {same} of {len(want)} answers the same")
        yield one, other


def run() -> None:
    plain = demo_engines.make()
    drafting = Engine(
        plain.executor, 32, 512, 8192, tuple(plain.eos_token_ids), draft_tokens=MAX_DRAFT_TOKENS
    )
    play(plain, repeated()[:1], 1)
    rows = []
    for name, prompts, at_once, temperature, bar in (
        ("ngram-ratio-smollm2-cpu", repeated(), 1, 0.0, "1.5"),
        ("ngram-ratio-smollm2-cpu-4", repeated(), PROMPTS, 0.0, "-"),
        ("ngram-ratio-smollm2-cpu-random", unrelated(), 1, 1.0, "-"),
        ("ngram-ratio-smollm2-cpu-random-4", unrelated(), PROMPTS, 1.0, "-"),
    ):
        counts = drafting.speculation
        assert counts is not None
        before = counts.drafted, counts.accepted
        times = list(pairs(plain, drafting, prompts, at_once, temperature))
        ratios = sorted(one / other for one, other in times)
        ratio = min(one for one, _ in times) / min(other for _, other in times)
        record(name, ratio, "ratio", (ratios[0], ratios[-1]))
        drafted, accepted = counts.drafted - before[0], counts.accepted - before[1]
        rate = PROMPTS * OUTPUT / min(other for _, other in times)
        rows.append([name, f"{rate:.0f}", f"{ratio:.2f}", bar, f"{accepted} of {drafted}"])
    head = ["workload", "tok/s", "of plain", "bar", "accepted"]
    table("n-gram drafts, SmolLM2-135M, float32, 2 threads, best of three", head, rows)
