"""The whole engine on a GPU: steps in flight, real out-of-memory, GEMM autotuning."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pairs import engine, worker

from kvline_server.engine.engine import Engine
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.row_counts import tried
from kvline_server.kernels.tuning import parse, texts
from kvline_server.model.config import ModelConfig

pytestmark = pytest.mark.gpu
STEPS = 10_000
SHARED = [7] * 48  # a prefix that the cache holds


def play(made: Engine, depth: int, steps: int) -> dict[int, list[int]]:
    """Random arrivals and departures by step number alone, and room for all, so that both depths
    see the same batches. -> tokens of each request that was not aborted"""
    worker(made).kernels.depth = depth
    out: dict[int, list[int]] = {}
    wanted: dict[int, int] = {}
    known = worker(made).decoder.config.vocabulary
    last, seen = 0, -1
    while made.steps < steps or not made.idle:
        rng = random.Random(made.steps)
        if made.steps < steps and (rests(made) or made.steps != seen):
            if rests(made) or rng.random() < 0.4:
                last += 1
                prompt = SHARED * (rng.random() < 0.3)
                prompt = prompt + [rng.randrange(known) for _ in range(rng.randint(1, 120))]
                out[last], wanted[last] = [], rng.randint(1, 60)
                made.submit(last, prompt, SamplingParams(wanted[last], 0.0, ignore_eos=True))
            if rng.random() < 0.05:
                gone = last - rng.randint(0, 12)
                made.abort(gone)
                out.pop(gone, None)
        seen = made.steps
        for output in made.step():
            if output.sequence.id in out:
                out[output.sequence.id].extend(output.tokens)
    made.caches.check([each.table for each in made.scheduler.running])
    assert made.caches.used == 0 and not made.sequences
    assert {id: len(tokens) for id, tokens in out.items()} == {id: wanted[id] for id in out}
    return out


def rests(made: Engine) -> bool:
    """Whether no step can follow, whichever tokens are not read yet."""
    scheduler = made.scheduler
    return not scheduler.waiting and all(s.length >= s.limit for s in scheduler.running)


def test_ten_thousand_steps_in_flight_output_what_synchronous_steps_output(
    shape: Callable[..., ModelConfig],
) -> None:
    config = shape(128, True)
    waiting, ahead = (play(engine(config, 4000, 64), depth, STEPS) for depth in (0, 1))
    assert len(ahead) > 1000
    assert ahead == waiting


def test_steps_in_flight_lose_no_token_where_pages_and_slots_run_out(
    shape: Callable[..., ModelConfig],
) -> None:
    made = engine(shape(128, True), pages=30)
    assert len(play(made, 1, STEPS // 4)) > 200
    assert made.scheduler.preemptions > 10


@contextmanager
def full_gpu(leave: int) -> Iterator[None]:
    """All of the GPU's free memory but `leave` bytes, taken outside torch's own pool."""
    from kvline_server.memory.cuda import CudaDevice

    torch.cuda.empty_cache()
    with CudaDevice().held(torch.cuda.mem_get_info()[0] - leave):
        yield


def test_a_real_out_of_memory_keeps_its_type_and_the_engine_can_go_on(
    shape: Callable[..., ModelConfig],
) -> None:
    made = engine(shape(vocabulary=128_000), running=256, step=2048, pages=400)
    worker(made).logprob_rows = 2048
    params = SamplingParams(1, 0.0, ignore_eos=True, prompt_logprobs=20)
    with full_gpu(64 << 20), pytest.raises(DeviceOutOfMemory):
        made.submit(1, list(range(10, 2010)), params)
        made.step()
    made.abort(1)
    made.submit(2, list(range(10, 2010)), params)
    outputs = [o for _ in range(4) for o in made.step()]
    assert [o.finish for o in outputs] == ["length"]


def test_autotuning_leaves_out_the_lm_head_and_its_memory(
    shape: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(shape(vocabulary=128_000), step=2048)
    runner = worker(made)
    from kvline_server.kernels import bf16_linear, formats

    replay_time = formats.replay_time

    def slow_torch(work: Any, count: int, best_yet: float) -> float:
        """On some GPUs none of these shapes has a faster kernel than torch's."""
        took = replay_time(work, count, best_yet)
        return math.inf if work.__defaults__ == (bf16_linear.TORCH,) else took

    monkeypatch.setattr(formats, "replay_time", slow_torch)

    def forbidden(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the LM head ran while kernels were tuned")

    monkeypatch.setattr(runner.decoder, "compute_logits", forbidden)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = runner.tune(2048, None)
    grown = torch.cuda.max_memory_allocated() - before
    assert done and grown < 2048 * 128_000 * 2 / 4
    another = worker(engine(shape(vocabulary=128_000), step=2048))
    assert another.tune(2048, parse(texts(done))) == done


def test_an_autotuned_kernel_gives_the_result_that_torch_gives(
    shape: Callable[..., ModelConfig],
) -> None:
    runner = worker(engine(shape()))
    made = runner.kernels.gemms.formats  # type: ignore[attr-defined]
    for rows in tried(1024):
        for layers in runner.decoder.gemm_weights():
            assert isinstance(layers[0], torch.Tensor)
            x = torch.randn((rows, layers[0].shape[1]), device="cuda", dtype=torch.bfloat16)
            out = x.new_empty((rows, len(layers[0])))
            want = x.float() @ layers[0].float().t()
            for choice in made.of(layers[0]).candidates(x, layers[0], out):
                out.fill_(float("nan"))
                made.of(layers[0]).run(x, layers[0], out, choice)
                distance = float((out.float() - want).norm() / want.norm())
                assert distance < 1e-2, (rows, tuple(layers[0].shape), choice, distance)
