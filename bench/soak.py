"""Soak test for out-of-memory: the worst allowed mix at the validated budget, for minutes, with no
headroom.

Half of the requests use every option at once: top-20 logprobs of output and prompt, top-k,
top-p, min-p, every penalty and 300 biases. The others vary: long scored prompts, full batches of
decodes with and without filters, and clients that leave. Free memory and the allocator's reserved
memory are read throughout, and whether graphs run the steps of several prompts. With
KVLINE_BENCH_SPECULATION=NGram every decode that may has the most draft tokens, whatever they cost
and whether they are accepted. With KVLINE_BENCH_GRAMMARS=json, or =tools, most requests follow one
of several schemas, or of several lists of tools. With KVLINE_BENCH_IMAGES=1 half of the requests
have 1 to 8 images, up to the default bound of patches; without a GPU of tiny models, which shows
that it runs.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import image_requests
import image_shapes
import msgspec
import offline
import peers
import structured
import torch
import watch
from captured import Captured, several, with_images
from record import record, table
from shapes import SHAPES

from kvline_contract.launch import Device, Method, Speculation
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Pictures
from kvline_server.engine.request import Sequence
from kvline_server.engine.speculation import may_draft
from kvline_server.engine.stress.steps import worst_params
from kvline_server.errors import DeviceOutOfMemory, StepFailed
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.options.arguments import GrammarService

WORST = 0.5  # share of requests with every option
WAITING = 200  # queue length beside the running requests
FOLLOWING = 0.7  # share of requests with a grammar, where there are any
SEEING = 0.5  # share of requests with images, where there are any
LONGEST, MOST_TOKENS = 8000, 190  # tokens of a text and of an answer
HEAD = ["model", "KV tokens", "OOM", "lowest free MiB", "reserve grew MiB", "requests", "preempted"]
HEAD += ["errors", "images encoded", "host grew MiB: half of the time, all"]
HEAD += ["steps of several prompts on graphs", "steps with images on graphs"]


def request(
    rng: random.Random,
    vocabulary: int,
    keys: abc.Sequence[bytes] = (),
    max_model_len: int = offline.MAX_MODEL_LEN,
) -> tuple[list[int], SamplingParams]:
    """`keys`: of the grammars that it may follow."""
    prompt, params = _request(rng, vocabulary, min(LONGEST, max_model_len - 1 - MOST_TOKENS))
    if keys and rng.random() < FOLLOWING:
        params = msgspec.structs.replace(params, grammar=rng.choice(keys))
    return prompt, params


def _request(rng: random.Random, vocabulary: int, longest: int) -> tuple[list[int], SamplingParams]:
    kind = rng.random()
    longest = longest if kind < 0.2 else min(longest, 700)
    prompt = [rng.randrange(10, vocabulary - 10) for _ in range(rng.randint(1, longest))]
    if rng.random() < WORST:
        asked = {"max_tokens": rng.randint(1, MOST_TOKENS), "seed": rng.randrange(1 << 30)}
        return prompt, msgspec.structs.replace(worst_params(vocabulary, 20), **asked)
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, MOST_TOKENS),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 50]),
        frequency_penalty=0.3 if kind > 0.98 else 0.0,
        logprobs=20 if 0.2 <= kind < 0.4 else None,
        prompt_logprobs=20 if kind < 0.3 else None,
        seed=rng.randrange(1 << 30),
        ignore_eos=True,
    )


class Always:
    """In the place of drafts that are found and pay."""

    def __init__(self, engine: Engine) -> None:
        speculation = engine.speculation
        assert speculation is not None
        self.most = speculation.most
        speculation.draft = self.draft  # type: ignore[method-assign]
        speculation.waits = lambda running: True  # type: ignore[method-assign]

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        room = sequence.limit - len(sequence.tokens) - 1
        count = min(self.most, most, room) if may_draft(sequence.params) else 0
        return [1 + sequence.id % 50] * max(0, count)


@dataclass(slots=True)
class Figures:
    """Of a run; its memory begins with it."""

    memory: watch.Memory = field(default_factory=watch.Memory)
    out_of_memory: int = 0
    requests: int = 0
    errors: int = 0  # requests that ended with one
    preempted: int = 0
    encoded: int = 0  # images

    @property
    def cells(self) -> list[str]:
        """As HEAD has them."""
        of = self.memory
        every = [self.out_of_memory, of.lowest, of.grew, self.requests, self.preempted, self.errors]
        return [*(f"{figure:.0f}" for figure in every), str(self.encoded), of.host_text]

    def line(self, running: int) -> str:
        of = self.memory
        return (
            f"  {self.requests} requests, {running} running, {self.encoded} images encoded, "
            f"{self.errors} errors, {of.lowest:.0f} MiB free at least, host {of.host_text} MiB"
        )


def soak(
    engine: Engine,
    vocabulary: int,
    seconds: float,
    keys: abc.Sequence[bytes] = (),
    images: image_requests.Source | None = None,
) -> Figures:
    """With `images` half of the requests have some."""
    rng, found, pace = random.Random(0), Figures(), watch.Pace(10)
    encoding, end = engine.encoding, time.monotonic() + seconds
    while time.monotonic() < end:
        while len(engine.scheduler.waiting) < WAITING:
            prompt, params = request(rng, vocabulary, keys, engine.max_model_len)
            pictures: Pictures | None = None
            if images is not None and rng.random() < SEEING:
                room = engine.max_model_len - params.max_tokens
                prompt, pictures = images.among(rng, prompt, room)
            engine.submit(found.requests, prompt, params, pictures)
            found.requests += 1
        try:
            for output in engine.step():
                found.errors += output.finish == "error"
                if output.reason:
                    print(output.reason, flush=True)
        except (DeviceOutOfMemory, StepFailed) as error:
            print(error, flush=True)
            found.out_of_memory += 1
            break
        if rng.random() < 0.05 and engine.sequences:
            engine.abort(rng.choice(list(engine.sequences)))
        found.memory.read()
        found.encoded = encoding.encoded if encoding is not None else 0
        if pace.due():
            found.memory.read_host()
            print(found.line(len(engine.scheduler.running)), flush=True)
    found.memory.read_host()
    found.preempted = engine.scheduler.preemptions
    return found


def run() -> None:
    """KVLINE_BENCH_MODELS selects models, KVLINE_BENCH_SECONDS is the duration (480)."""
    seconds = float(os.environ.get("KVLINE_BENCH_SECONDS", "480"))
    method, kind, seen = (
        os.environ.get(f"KVLINE_BENCH_{n}", "") for n in ("SPECULATION", "GRAMMARS", "IMAGES")
    )
    rows = []
    for name in offline.models(*([",".join(image_shapes.usual())] if seen else [])):
        make = partial(one, name, seconds, method, kind, bool(seen))
        if kind:
            rows.append(structured.within(name, structured.several(kind), make))
        else:
            rows.append(make())
        gc.collect()  # else the next start may find this one's weights
        torch.cuda.empty_cache()
    table(f"Worst allowed mix at headroom 0, {seconds:.0f} s", HEAD, rows)


def one(
    name: str,
    seconds: float,
    method: str,
    kind: str = "",
    seen: bool = False,
    service: GrammarService | None = None,
    keys: abc.Sequence[bytes] = (),
) -> list[str]:
    """A row of the table: an engine with draft tokens by `method`, grammars of a kind, and images
    where they are to be `seen`."""
    speculation, gpu = Speculation(Method(method)) if method else None, offline.gpu_name()
    more: dict[str, Any] = {} if gpu else offline.ON_CPU
    if seen:
        more = more | image_requests.longest(Device.CUDA if gpu else Device.CPU)
    engine, result = offline.start(
        name, headroom_mib=0, speculation=speculation, grammars=service, **more
    )
    if speculation is not None:
        Always(engine)
    vocabulary = SHAPES[name].vocabulary
    kinds = {"several": several} | ({"images": with_images(vocabulary)} if seen else {})
    steps = Captured(offline.worker(engine), kinds) if gpu and peers.GPUS == 1 else None
    source = image_requests.Source(name, engine) if seen else None
    figures = soak(engine, vocabulary, seconds, keys, source)
    label = offline.label(name, offline.only_cache())
    text = "text" if name in image_shapes.SEEING and not seen else ""
    label += "".join(f"-{each.lower()}" for each in (method, kind, text) if each)
    keep(label, figures, seconds, gpu)
    if steps is not None:
        steps.close()
        for of, ending in zip(kinds, ("", "-images"), strict=False):
            share = steps.share(of)
            record(f"graphs-share{ending}-{label}", share, "ratio", (share, share), gpu)
    engine.executor.resize((0,) * len(engine.executor.pages))
    shares = [steps.text(of) if steps and of in kinds else "" for of in ("several", "images")]
    return [label, str(result.kv_tokens), *figures.cells, *shares]


def keep(label: str, figures: Figures, seconds: float, gpu: str | None) -> None:
    """Of a run's figures those that have a name."""
    of, during = figures.memory, f"in {seconds:.0f} s"
    values = [
        ("oom", figures.out_of_memory, during),
        ("lowest-free", of.lowest, "MiB"),
        ("reserve-grew", of.grew, "MiB"),
        ("errors", figures.errors, during),
        ("host-grew", of.host, "MiB"),
    ]
    for name, value, unit in values:
        record(f"soak-{name}-{label}", value, unit, (value, value), gpu)
