"""How near answers with an fp8 KV cache are to those without: the same model after one another with
either cache, over the same prompts.

Logprobs are those of the prompts' tokens, so both see the same text, and so is the share of
positions whose most likely token is the same. Greedy outputs are compared up to the first token in
which they differ: behind it they are answers to different questions.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from pathlib import Path
from pydoc_data.topics import topics

import model
import numpy as np
import offline
import torch
from record import record, table
from shapes import SHAPES
from tokenizers import Tokenizer

from kvline_contract.launch import Device, KVCacheDtype
from kvline_server.engine.request import Scores
from kvline_server.ipc.sampling_params import SamplingParams

PROMPTS, LENGTH, OUTPUT = 32, 512, 64
KV_TOKENS = 32768  # of either cache, so that a CPU need not search for what fits


def run() -> None:
    """KVLINE_BENCH_MODELS names folders of models, or shapes, which get random weights and tokens;
    by default SmolLM2. On a GPU where there is one."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    rows = []
    named = [name for name in offline.models("") if name]
    for name in named or [str(model.ensure(print))]:
        plain, fp8 = (answers(name, cache, gpu is not None) for cache in KVCacheDtype)
        pairs = list(zip(plain, fp8, strict=True))
        far = np.concatenate([np.abs(a.values - b.values) for (_, a), (_, b) in pairs])
        same = np.concatenate([a.top_ids[:, 0] == b.top_ids[:, 0] for (_, a), (_, b) in pairs])
        agreed = np.mean([common(a, b) / OUTPUT for (a, _), (b, _) in pairs])
        most = float(np.quantile(far, 0.99))
        label = Path(name).name
        found = {"logprob": far.mean(), "best-token": same.mean(), "greedy": agreed}
        for what, value in found.items():
            unit = "nats" if what == "logprob" else "ratio"
            record(f"fp8kv-{what}-{label}", float(value), unit, (float(value), float(value)), gpu)
        figures = [f"{far.mean():.4f}", f"{most:.4f}", f"{same.mean():.4f}", f"{agreed:.3f}"]
        rows.append([label, str(len(far)), *figures])
    head = ["model", "positions", "logprob distance, nats", "99 %", "same best token", "greedy"]
    table(f"An fp8 KV cache against the default; greedy: share of {OUTPUT} tokens", head, rows)


def answers(name: str, cache: KVCacheDtype, gpu: bool) -> list[tuple[list[int], Scores]]:
    """Greedy outputs, and the scores of the prompts."""
    device = Device.CUDA if gpu else Device.CPU
    engine, result = offline.start(name, device, PROMPTS, 1, cache, KV_TOKENS)
    print(f"{name}: {result.cache_dtype}, {result.bytes_per_token} bytes a token", flush=True)
    params = SamplingParams(OUTPUT, 0.0, ignore_eos=True, prompt_logprobs=1)
    for id, prompt in enumerate(prompts(name)):
        engine.submit(id, prompt, params)
    made: dict[int, list[int]] = {id: [] for id in range(PROMPTS)}
    scored: dict[int, Scores] = {}
    while not engine.idle:
        for output in engine.step():
            made[output.sequence.id].extend(output.tokens)
            if output.prompt_scores is not None:
                scored[output.sequence.id] = output.prompt_scores
    engine.executor.resize((0,) * len(engine.executor.pages))
    del engine
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return [(made[id], scored[id]) for id in range(PROMPTS)]


def prompts(name: str) -> list[list[int]]:
    """Pieces of Python's reference, which its pydoc brings along; of a shape random tokens."""
    if name in SHAPES:
        rng = random.Random(0)
        known = SHAPES[name].vocabulary
        return [[rng.randrange(known) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    text = "".join(topics[name] for name in sorted(topics))
    ids: list[int] = Tokenizer.from_file(os.path.join(name, "tokenizer.json")).encode(text).ids
    step = (len(ids) - LENGTH) // PROMPTS
    return [ids[at * step : at * step + LENGTH] for at in range(PROMPTS)]


def common(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(a, b, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
