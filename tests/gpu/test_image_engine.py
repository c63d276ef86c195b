"""Images served on a GPU, by scheduler, tower, captured segments and decodes, against transformers
in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from engines import finish, greedy
from image_models import Part, bounds_of, logits, over, prompt_of, rank_of
from pairs import windows_of
from vision_models import picture, saved

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.speculation import decode_rows
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Arena, HostArena, KVShape
from kvline_server.model.config import read_config

pytestmark = pytest.mark.gpu
RUNNING, STEP, LONGEST, PAGES, OUTPUT = 4, 128, 400, 120, 16
TALL, WIDE, SMALL = picture(40, 24, 1), picture(16, 88, 2), picture(8, 8, 3)
TEXT = list(range(20, 60))
PROMPTS: list[list[Part]] = [
    [5, 9, 17, TALL, 33, 34, 35],
    [WIDE, 7, 8],
    [7, 8, 9, SMALL],
    [1, TALL, 6, SMALL, 2, 3, WIDE, 4, TALL, 5],
    [*TEXT, TALL, *TEXT, WIDE, *TEXT, *TEXT],  # of two chunks, and then in the prefix cache
    [*TEXT, 11, 12],
]


def served(family: str, kernels: Kernels, arenas: Callable[[KVShape, int], Arena]) -> Engine:
    bounds, rows = bounds_of(family, STEP), decode_rows(RUNNING, STEP, 0)
    sizes = STEP, RUNNING, PAGES, LONGEST, rows
    alone = rank_of(family, kernels, bounds, *sizes, arenas)
    alone.capture(STEP, LONGEST)
    return over(alone, family, bounds, STEP, RUNNING, LONGEST)


def on_gpu(family: str) -> Engine:
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena

    config = read_config(saved(family).folder)
    heads = config.heads, config.kv_heads, config.head_dim
    return served(family, FlashInferKernels(*heads, windows=windows_of(config)), CudaArena)


class Errors(NamedTuple):
    """Of all answers' tokens, against transformers in float32."""

    each: torch.Tensor  # of their logprobs
    worse: torch.Tensor  # their logprobs than the best token's


def errors(made: Engine, family: str, turn: int) -> Errors:
    asked = [prompt_of(family, parts) for parts in PROMPTS]
    for at, (own, pictures) in enumerate(asked):
        given = pictures if pictures.images else None
        made.submit(100 * turn + at, list(own), greedy(OUTPUT, logprobs=0), given)
    found = finish(made)
    every = []
    for at, (parts, (own, _)) in enumerate(zip(PROMPTS, asked, strict=True)):
        outputs: list[Output] = found[100 * turn + at]
        answer = [token for output in outputs for token in output.tokens]
        values = torch.tensor([float(o.scores.values[0]) for o in outputs if o.scores is not None])
        want = logits(family, parts, own, answer)[len(own) - 1 : -1].log_softmax(-1)
        chosen = want.gather(1, torch.tensor(answer).view(-1, 1)).view(-1)
        every.append(Errors((values - chosen).abs(), want.amax(-1) - chosen))
    return Errors(*(torch.cat(each) for each in zip(*every, strict=True)))


@pytest.mark.parametrize("family", ["qwen3_vl_wide", "qwen2_5_vl_wide", "qwen3_5_wide"])
def test_answers_are_as_near_transformers_as_those_of_a_cpu_in_bfloat16(family: str) -> None:
    """Cold, then from the prefix cache."""
    gpu, cpu = on_gpu(family), served(family, TorchKernels(torch.bfloat16), HostArena)
    for turn in range(2):
        got, want = (errors(made, family, turn) for made in (gpu, cpu))
        figures = [(float(e.each.median()), int((e.worse > 0.5).sum())) for e in (got, want)]
        print(family, turn, *figures, float(got.each.mean()), float(got.worse.max()))
        (median, far), (least, known) = figures
        assert median < 1.5 * least + 0.01 and median < 0.1
        assert far <= 1.5 * known + 3
