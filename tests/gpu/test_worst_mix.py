"""A size validated with no headroom at all, then all that requests may ask for at once: every one
of 512 with top-20 scores of output and prompt, every filter, every penalty and 300 biases."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import msgspec
import pytest
from test_start import CONFIG

from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    LaunchConfig,
    LoadFormat,
    Model,
)
from kvline_server.engine.engine import Engine
from kvline_server.engine.stress.steps import worst_params
from kvline_server.engine_process.start import start

pytestmark = pytest.mark.gpu
RUNNING, STEPS, VOCABULARY = 512, 150, 128_256


def sized(folder: Path) -> Engine:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": VOCABULARY}))
    model = Model(str(folder), str(folder), "m", LoadFormat.RANDOM)
    launch = LaunchConfig(
        version=1,
        namespace="",
        service="",
        revision="",
        image="",
        device=Device.CUDA,
        tensor_parallel=1,
        model=model,
        engine=EngineOptions(4096, RUNNING),
        capacity=CapacityOptions(headroom_mib=0),
    )
    state = folder / "attempts.json"
    made, _ = start(launch, lambda _: None, state, None, lambda: None, None, os.getpid())
    return made


def test_all_requests_at_their_worst_fit_into_a_size_without_headroom(tmp_path: Path) -> None:
    engine = sized(tmp_path)
    rng = random.Random(0)
    params = worst_params(VOCABULARY, 20)
    made = most = steps = 0
    while steps < STEPS:
        while len(engine.scheduler.waiting) < 64:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 900))]
            asked = msgspec.structs.replace(params, max_tokens=rng.randint(60, 200), seed=made)
            engine.submit(made, prompt, asked)
            made += 1
        engine.step()  # raises DeviceOutOfMemory
        most = max(most, len(engine.scheduler.running))
        steps += most == RUNNING  # counted from when all of them run
    engine.executor.resize(
        (0,) * len(engine.executor.pages)
    )  # other tests of this process have the GPU now
