"""An engine with the demo model in this process, built as in the server's engine process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import model
import torch

from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import HostArena
from kvline_server.memory.device import cpu_device
from kvline_server.memory.groups import GroupedArena
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder, cache_groups
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker

THREADS = 2
PAGES = 1400


def folder() -> Path:
    return model.ensure(print)


def make(running: int = 32, rows: int = 224) -> Engine:
    torch.set_num_threads(THREADS)
    config = read_config(folder())
    kernels = TorchKernels()
    source = SafetensorsSource(folder())
    weights = load_weights(source, config, kernels)
    (group,) = cache_groups(config, 8192, torch.float32)
    arena = GroupedArena((group,), HostArena, PAGES * group.page_bytes)
    arena.resize((PAGES,))
    worker = Worker(Decoder(config, weights, 8192, kernels), arena, rows, running)
    executor = Local(worker, cpu_device(None, os.getpid()))
    return Engine(executor, running, 512, 8192, config.eos_token_ids)


def drain(engine: Engine, until: Callable[[], bool] = lambda: False) -> None:
    while not engine.idle and not until():
        engine.step()


def greedy(max_tokens: int, **more: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]
