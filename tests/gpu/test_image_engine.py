"""Images served on a GPU, by scheduler, tower, captured segments and decodes, against transformers
in float32."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import finish, greedy
from image_models import Part, bounds_of, logits, of_family, over, prompt_of, rank_of
from pairs import windows_of
from vision_models import BY, picture, saved

from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    Images,
    LaunchConfig,
    LoadFormat,
    Model,
)
from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.speculation import decode_rows
from kvline_server.engine_process.start import start
from kvline_server.ipc.messages import Progress
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
    two_way = saved(family).config.two_way
    kernels = FlashInferKernels(*heads, windows=windows_of(config, LONGEST), two_way=two_way)
    return served(family, kernels, CudaArena)


class Errors(NamedTuple):
    """Of all answers' tokens, against transformers in float32."""

    each: torch.Tensor  # of their logprobs
    worse: torch.Tensor  # their logprobs than the best token's


def errors(made: Engine, family: str, turn: int) -> Errors:
    prompts = [of_family(family, parts) for parts in PROMPTS]
    asked = [prompt_of(family, parts) for parts in prompts]
    for at, (own, pictures) in enumerate(asked):
        given = pictures if pictures.images else None
        made.submit(100 * turn + at, list(own), greedy(OUTPUT, logprobs=0), given)
    found = finish(made)
    every = []
    for at, (parts, (own, _)) in enumerate(zip(prompts, asked, strict=True)):
        outputs: list[Output] = found[100 * turn + at]
        answer = [token for output in outputs for token in output.tokens]
        values = torch.tensor([float(o.scores.values[0]) for o in outputs if o.scores is not None])
        want = logits(family, parts, own, answer)[len(own) - 1 : -1].log_softmax(-1)
        chosen = want.gather(1, torch.tensor(answer).view(-1, 1)).view(-1)
        every.append(Errors((values - chosen).abs(), want.amax(-1) - chosen))
    return Errors(*(torch.cat(each) for each in zip(*every, strict=True)))


GEMMA = ["gemma3_128", "gemma3_256"]  # the latter with windows, of fewer tokens than an image


@pytest.mark.parametrize("family", ["qwen3_vl_wide", "qwen2_5_vl_wide", "qwen3_5_wide", *GEMMA])
def test_answers_are_as_near_transformers_as_those_of_a_cpu_in_bfloat16(family: str) -> None:
    """Cold, then from the prefix cache."""
    as_near_as_a_cpu(on_gpu(family), family, turns=2)


def as_near_as_a_cpu(gpu: Engine, family: str, turns: int) -> None:
    cpu = served(family, TorchKernels(torch.bfloat16), HostArena)
    for turn in range(turns):
        got, want = (errors(made, family, turn) for made in (gpu, cpu))
        figures = [(float(e.each.median()), int((e.worse > 0.5).sum())) for e in (got, want)]
        print(family, turn, *figures, float(got.each.mean()), float(got.worse.max()))
        (median, far), (least, known) = figures
        assert median < 1.5 * least + 0.01 and median < 0.1
        assert far <= 1.5 * known + 3


@pytest.mark.parametrize("family", GEMMA)
def test_a_start_has_played_images_that_are_not_cut_and_serves_them(
    family: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved(family).folder, folder)
    by = {"image_mean": list(BY.mean), "image_std": list(BY.std)}
    size = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(size | by))
    model = Model(str(folder), str(folder), "tiny", LoadFormat.WEIGHTS)
    asked = EngineOptions(LONGEST, RUNNING, STEP, images=Images.REQUIRED), CapacityOptions(4096, 8)
    heard = list[Any]()
    made, _ = start(
        launch=LaunchConfig(1, "ns", "svc", "abcde", "image", Device.CUDA, 1, model, *asked),
        send=heard.append,
        attempts=tmp_path / "attempts.json",
        record=None,
        wait_for_neighbours=lambda: None,
        memory=None,
        root=os.getpid(),
    )
    updates = [message for message in heard if isinstance(message, Progress)]
    assert "images" in {each.current.name for each in updates if each.current is not None}
    assert not [each.warning for each in updates if each.warning and "slower" in each.warning]
    as_near_as_a_cpu(made, family, turns=1)
