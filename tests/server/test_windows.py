"""Sliding windows that free what they left behind give what the reference gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import decoder, finish, greedy
from near import TOLERANCE

from kvline_server.engine.engine import Engine
from kvline_server.memory.arena import HostArena
from kvline_server.memory.device import cpu_device
from kvline_server.memory.groups import CacheSizes, GroupedArena
from kvline_server.model.decoder import cache_groups
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker

WINDOW = 21  # of the tests' models, but for gpt-oss, which has 8, and sinks far from 0
MODELS = ["gemma3", "mistral-window", "qwen2-window", "phi3", "gpt-oss"]
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 130, 200, 45, 45, 45, 45]
OUTPUT = 30


def engine(folder: Path, tokens: int, running: int = 4, rows: int = 24) -> Engine:
    """With no more pages than sizing gives to so many tokens."""
    made = decoder(folder, 512)
    groups = cache_groups(made.config, 512, torch.float32)
    arena = GroupedArena(groups, HostArena, 64 << 20)
    arena.resize(CacheSizes(groups, running, rows).pages(tokens))
    executor = Local(Worker(made, arena, 64, running), cpu_device(None, 1))
    return Engine(executor, running, rows, 512, ())


def prompt(length: int, base: int = 0) -> list[int]:
    return [(base + 11 * i) % 290 + 3 for i in range(length)]


def check(folder: Path, prompts: list[list[int]], made: list[list[int]]) -> None:
    """The reference has each token behind those before it, but where two are the best."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for tokens, output in zip(prompts, made, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokens + output])).logits[0, len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert (chosen >= logits.amax(dim=1) - 2 * TOLERANCE).all()


def served(made: Engine, prompts: list[list[int]]) -> list[list[int]]:
    for id, tokens in enumerate(prompts):
        made.submit(id, list(tokens), greedy(OUTPUT))
    found = finish(made)
    made.caches.check([])
    return [[t for each in found[id] for t in each.tokens] for id in range(len(prompts))]


@pytest.mark.parametrize("family", MODELS)
def test_output_equals_the_reference_under_at_and_over_the_window(
    family: str, make_model: Callable[..., Path]
) -> None:
    """In chunks of 24 rows that end anywhere, four prompts at once; then one by one, and each again
    with what the prefix cache has of it; then over pages for one of the longest, with
    preemption."""
    folder = make_model(family)
    prompts = [prompt(length, base) for base, length in enumerate(LENGTHS)]
    made = engine(folder, 4096)
    assert any(made.caches.windows)
    wanted = served(made, prompts)
    check(folder, prompts, wanted)
    for one, output in zip(prompts, wanted, strict=True):
        assert served(made, [one]) == [output]
        made.submit(0, [*one, *output[:-1]], greedy(1))
        (last,) = finish(made)[0]
        assert last.tokens == output[-1:]
        assert last.sequence.cached == (len(last.sequence.tokens) - 2) // 16 * 16
    small = engine(folder, 240, rows=200)
    assert served(small, prompts[::-1]) == wanted[::-1]
    if made.caches.windows[0] == 0:
        assert small.scheduler.preemptions
    assert all(pool.used == 0 for pool in small.caches.pools)


def test_windows_hold_what_running_sequences_see_and_no_more(
    make_model: Callable[..., Path],
) -> None:
    made = engine(make_model("gemma3"), 2048, running=3)
    for id in range(3):
        made.submit(id, prompt(200, id), greedy(60))
    most = 0
    while not made.idle:
        made.step()
        most = max(most, made.caches.pools[1].used)
    whole, windowed = (pool.total for pool in made.caches.pools)
    assert most <= windowed < 3 * 260 // 16 < whole
