"""Requests that run at once where the spec does not say: as many as let the model start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from servers import launch_config

from kvline_contract.launch import EngineOptions
from kvline_contract.progress import WAITS_FOR_HTTP
from kvline_server.engine_process.start import load_rank
from kvline_server.ipc.messages import Progress
from kvline_server.memory.arena import KVShape
from kvline_server.memory.device import MIB, CpuDevice
from kvline_server.memory.groups import CacheGroup, parts
from kvline_server.memory.parts import fitting, growing
from kvline_server.sizing.running import FEWEST, bounded, left
from kvline_server.sizing.settings import EngineSettings, logprob_rows

VOCABULARY = 8192
KEPT = {n: KVShape(n, 4, 64, torch.float32) for n in (1, 5)}
CACHE = parts((CacheGroup(0, (), KEPT[1]), CacheGroup(1024, (), KEPT[5])))


def settings(limit: int, max_model_len: int | None = None) -> EngineSettings:
    return EngineSettings(
        max_model_len, 8192, 16, 512, 20, 32, logprob_rows(limit, VOCABULARY), None
    ).changed(max_running_requests=16)


def test_a_small_container_keeps_room_for_the_full_layers() -> None:
    """A Gemma 3 of 6 layers in 700 MiB, with what was measured of its start: the windows of 16
    requests take 170 MiB, those of 8 take 88, and 83 were left for both groups."""
    limit = 700 * MIB
    made, clients, weights = settings(limit), 85 * MIB, 23 * MIB
    device = CpuDevice("cpu", "", limit, lambda: (256 + 71) * MIB)
    known = left(device, made, weights, VOCABULARY) - clients
    running = bounded(made, CACHE, known)
    assert running == 4
    measured = limit - (23 + 267 + 71 + 64 + 51 + 24 + 32) * MIB - clients
    assert fitting(CACHE, measured, running, made.mapped_rows) > 10_000
    assert fitting(CACHE, measured, FEWEST, made.mapped_rows) < 0
    assert fitting(CACHE, known, running, made.mapped_rows) > 0, "left is no more than was measured"


@given(st.integers(0, 2000), st.sampled_from([None, 1024, 4096, 8192]))
def test_where_some_number_of_requests_starts_the_chosen_one_does(
    mib: int, asked: int | None
) -> None:
    made = settings(700 * MIB, asked)
    rows, remains = made.mapped_rows, mib * MIB
    running = bounded(made, CACHE, remains)

    def starts(count: int) -> bool:
        return growing(CACHE, asked or 32, count, rows) <= remains

    if starts(1):
        assert starts(running)
    if running < FEWEST:
        quarter = remains - growing(CACHE, 0, 2 * running, rows) < remains // 4
        assert quarter or not starts(2 * running), "no fewer than must be"


@pytest.mark.parametrize(("length", "asked"), [(None, None), (None, 4), (16, None)])
def test_what_depends_on_the_memory_waits_for_the_processes_that_take_some(
    make_model: Callable[..., Path], length: int | None, asked: int | None
) -> None:
    """A context that the window hides nothing of keeps none beside the cache, and the model
    has windows all the same: a longer one would."""
    launch = launch_config(make_model("gemma3"), EngineOptions(length, asked, 64))
    heard: list[str | None] = []

    def send(progress: Progress) -> None:
        if progress.current is not None:
            heard.append(progress.current.name)

    made = load_rank(
        launch, send, 8 << 30, os.getpid(), wait_for_neighbours=lambda: heard.append("waited")
    )
    assert heard == ([] if asked or length else [WAITS_FOR_HTTP, "waited", None])
    assert made.loaded.windowed and len(made.loaded.groups) == (1 if length else 2)
    assert made.settings.table_bytes_per_token == 6 * 2 * (16 + 64) // 16, "as its attention takes"
    assert made.settings.max_running_requests == (asked or 16)
