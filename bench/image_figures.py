"""What images cost an engine, without HTTP: images a second beside text, gaps between tokens of
chats beside large ones, the first token behind one that was seen before, and memory.

With the shape of Qwen3-VL-8B, or without a GPU with a tiny one, which shows that the command runs.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import gaps
import image_requests
import numpy as np
import offline
import pool
import torch
import watch
from captured import Captured, with_images
from image_requests import Picture, Prompt, Source
from record import record, table
from shapes import SHAPES

from kvline_contract.memory import IMAGES
from kvline_contract.report import Result
from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams

USUAL = "qwen3vl-8b"  # whose results are named without it, where one model is measured
TEXT = 64  # tokens of a prompt beside its image
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Loads:
    """Sides are of images, in tokens, each of which is four patches."""

    chats: int  # at once, each with an image of its own
    side: int
    answer: int  # tokens
    warm: float  # seconds before what is measured
    seconds: float
    rounds: int
    beside: gaps.Load  # chats beside large images
    large: int
    repeated: int
    pairs: int  # of a new image and the same again, behind one that warms up


GPU = Loads(32, 16, 64, 2.0, 8.0, 2, gaps.Load(64, 600, 0, 1.0, 15.0, ()), 32, 32, 10)
CPU = Loads(3, 8, 8, 0.2, 0.8, 1, gaps.Load(3, 40, 0, 0.3, 1.2, ()), 16, 8, 3)


class Prompts:
    """No two of them have a page in common, but for images that are sent again."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.source, self.most = Source(name, engine), SHAPES[name].vocabulary - 20
        self._rng = random.Random(0)

    def text(self, tokens: int = TEXT) -> list[int]:
        return [self._rng.randrange(10, self.most) for _ in range(tokens)]

    def seeing(self, side: int) -> Prompt:
        """With an image that is new."""
        return self.source.prompt([self.source.new(side, side), self.text()])

    def reading(self, side: int) -> Prompt:
        """As long, of text alone."""
        return self.text(side**2 + TEXT), None


@dataclass(frozen=True, slots=True)
class Rate:
    """Of chats, a second."""

    tokens: float  # of answers
    images: float


def closed(engine: Engine, loads: Loads, make: Callable[[int], Prompt]) -> Rate:
    """Chats of which each asks anew once it has its answer."""
    pool.renew(engine)
    _chats(engine, loads, make, loads.warm)
    before, began = _encoded(engine), time.perf_counter()
    tokens = _chats(engine, loads, make, loads.seconds)
    took, images = time.perf_counter() - began, _encoded(engine) - before
    _drop(engine)
    return Rate(tokens / took, images / took)


def _chats(engine: Engine, loads: Loads, make: Callable[[int], Prompt], seconds: float) -> int:
    """-> tokens of answers"""
    tokens, pace, end = 0, watch.Pace(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        while len(engine.sequences) < loads.chats:
            prompt, pictures = make(loads.side)
            id = next(_ids)
            params = SamplingParams(loads.answer, 0.6, seed=id, ignore_eos=True)
            engine.submit(id, prompt, params, pictures)
        tokens += sum(len(output.tokens) for output in engine.step())
        pace.print(f"{tokens} tokens, {_encoded(engine)} images")
    return tokens


def _encoded(engine: Engine) -> int:
    return 0 if engine.encoding is None else engine.encoding.encoded


def _drop(engine: Engine) -> None:
    for id in list(engine.sequences):
        engine.abort(id)
    while not engine.idle:
        engine.step()


@dataclass(frozen=True, slots=True)
class First:
    """The first token of an answer."""

    seconds: float
    found: int  # tokens of its prompt in the prefix cache
    encoded: int  # images

    def hits(self, prompt: int) -> str:
        return f"{self.found} of {prompt} tokens in the prefix cache, {self.encoded} images encoded"


def first_token(engine: Engine, prompt: Prompt) -> First:
    """Of an engine that has nothing else to do."""
    before, (tokens, pictures) = _encoded(engine), prompt
    began, found = time.perf_counter(), list[First]()
    engine.submit(next(_ids), tokens, SamplingParams(1, 0.0, ignore_eos=True), pictures)
    while not engine.idle:
        for output in engine.step():
            took, encoded = time.perf_counter() - began, _encoded(engine) - before
            found.append(First(took, output.sequence.cached, encoded))
    (one,) = found
    return one


@dataclass(frozen=True, slots=True)
class Again:
    """An image that is new, with a text behind it; the same one with another text; and behind a
    text that is new, where none of its pages are in the prefix cache."""

    new: First
    again: First
    behind: First


def repeated(engine: Engine, prompts: Prompts, loads: Loads) -> list[Again]:
    pool.renew(engine)

    def ask(*parts: list[int] | Picture) -> First:
        return first_token(engine, prompts.source.prompt(parts))

    found, side = list[Again](), loads.repeated
    for _ in range(1 + loads.pairs):
        image = prompts.source.new(side, side)
        new, again = ask(image, prompts.text()), ask(image, prompts.text())
        found.append(Again(new, again, ask(prompts.text(), image)))
    return found[1:]


class Rows:
    """Of the table, which are printed as they come, and recorded."""

    def __init__(self, name: str, gpu: str | None) -> None:
        self.label, self.gpu = offline.label(name, offline.only_cache()), gpu
        self.ending = "" if name == USUAL else f"-{self.label}"
        self.rows: list[list[str]] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        bar: str = "",
        spread: tuple[float, float] | None = None,
        note: str = "",
    ) -> None:
        record(name, value, unit, spread or (value, value), self.gpu)
        between = "" if spread is None else f"{spread[0]:.3f} to {spread[1]:.3f}"
        self.rows.append([name, f"{value:.3f}", unit, bar, between, note])
        print(self.rows[-1], flush=True)


def run() -> None:
    """KVLINE_BENCH_MODELS selects models that see images."""
    gpu = offline.gpu_name()
    for name in offline.models(USUAL if gpu else "qwen3vl-tiny"):
        rows = one(name, gpu, GPU if gpu else CPU)
        table(f"{name} with images", ["figure", "value", "unit", "bar", "spread", ""], rows)


def one(name: str, gpu: str | None, loads: Loads) -> list[list[str]]:
    """Of a start that serves text alone, whose memory is given back, and one with images."""
    more: dict[str, Any] = {} if gpu else offline.ON_CPU | {"max_model_len": 1024}
    text = offline.start(name, **more)
    text[0].executor.resize((0,) * len(text[0].executor.pages))
    alone = text[1]
    del text
    gc.collect()  # else the next start may find this one's weights
    torch.cuda.empty_cache()
    engine, result = offline.start(name, options=image_requests.REQUIRED, **more)
    rows, prompts = Rows(name, gpu), Prompts(name, engine)
    sizes(rows, result, alone)
    seen = {"images": with_images(SHAPES[name].vocabulary)}
    steps = Captured(offline.worker(engine), seen) if gpu else None
    rates(rows, engine, prompts, loads)
    beside(rows, engine, prompts, loads)
    seen_before(rows, engine, prompts, loads)
    if steps is not None:
        steps.close()
        share, note = steps.share("images"), f"{steps.steps['images']} steps"
        rows.add(f"graphs-share-images-{rows.label}", share, "ratio", "1", note=note)
    engine.executor.resize((0,) * len(engine.executor.pages))
    return rows.rows


def sizes(rows: Rows, seeing: Result, alone: Result) -> None:
    """Of a start with images and one for text alone. On a CPU KV tokens are given, not found."""
    share = seeing.kv_tokens / alone.kv_tokens
    for what, result in (("text", alone), ("images", seeing)):
        listed = ", ".join(f"{part.name} {part.mib}" for part in result.memory.parts)
        print(f"{what}, MiB: {listed}", flush=True)
    note = f"{seeing.kv_tokens} of {alone.kv_tokens}"
    rows.add(f"kv-tokens-of-text-{rows.label}", share, "ratio", "0.97", note=note)
    parts = {part: seeing.memory.mib(part) for part in IMAGES}
    note = ", ".join(f"{part} {mib}" for part, mib in parts.items())
    rows.add(f"tower-mib-{rows.label}", sum(parts.values()), "MiB", "3072", note=note)


def rates(rows: Rows, engine: Engine, prompts: Prompts, loads: Loads) -> None:
    """The same chats with images and without, by turns."""
    text, seeing = list[Rate](), list[Rate]()
    for _ in range(loads.rounds):
        text.append(closed(engine, loads, prompts.reading))
        seeing.append(closed(engine, loads, prompts.seeing))
    found = [rate.images for rate in seeing]
    patches = 4 * loads.side**2
    note = f"{loads.chats} chats, {patches} patches each"
    spread = min(found), max(found)
    rows.add(f"images-per-s-{rows.label}", max(found), "images/s", "print", spread, note)
    shares = [one.tokens / other.tokens for one, other in zip(seeing, text, strict=True)]
    best = [max(rate.tokens for rate in each) for each in (seeing, text)]
    note = f"{best[0]:.0f} of {best[1]:.0f} tokens/s without images"
    spread = min(shares), max(shares)
    rows.add(f"image-text-ratio-{rows.label}", best[0] / best[1], "ratio", "0.6", spread, note)


def beside(rows: Rows, engine: Engine, prompts: Prompts, loads: Loads) -> None:
    """Chats beside an image each second, and beside as long a text."""
    patches, pairs = 4 * loads.large**2, (("image", prompts.seeing), ("text", prompts.reading))
    for kind, make in pairs:
        before = _encoded(engine)
        found = gaps.play(engine, loads.beside, partial(_arriving, make, loads.large))
        middle, p99, most = (float(np.percentile(found.gaps, q)) for q in (50, 99, 100))
        note = f"p50 {middle:.1f}, longest {most:.1f}; first token {1e3 * found.first:.0f} ms, "
        note += f"{_encoded(engine) - before} encoded, {found.unanswered} unanswered; "
        note += f"{loads.beside.chats} chats, {patches} patches" + " as text" * (kind == "text")
        bar = "60" if kind == "image" else ""
        name = "image-gap-p99-ms" if kind == "image" else "image-gap-p99-ms-as-text"
        rows.add(f"{name}{rows.ending}", p99, "ms", bar, (middle, most), note)


def _arriving(make: Callable[[int], Prompt], side: int, number: int) -> Prompt:
    return make(side)


def seen_before(rows: Rows, engine: Engine, prompts: Prompts, loads: Loads) -> None:
    """Times are medians. The first of the two figures has a bar: the usual case, of a question more
    about an image."""
    found, tokens = repeated(engine, prompts, loads), loads.repeated**2 + TEXT
    new = [each.new.seconds for each in found]
    rows.add(f"image-new-ttft-ms{rows.ending}", 1e3 * median(new), "ms")
    for name, bar, kind in (
        ("image-repeat-ttft-ratio", "0.35", [each.again for each in found]),
        ("image-repeat-ttft-ratio-behind-text", "", [each.behind for each in found]),
    ):
        shares = [one.seconds / first for one, first in zip(kind, new, strict=True)]
        value = median(one.seconds for one in kind) / median(new)
        spread, note = (min(shares), max(shares)), kind[-1].hits(tokens)
        rows.add(f"{name}{rows.ending}", value, "ratio", bar, spread, note)
