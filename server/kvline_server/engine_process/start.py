"""From a launch configuration to an engine with a validated KV budget: load, profile, build."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvline_contract.launch import LaunchConfig
from kvline_contract.report import Result, State
from kvline_server.engine.engine import Engine
from kvline_server.messages import Progress, SendProgress
from kvline_server.sizing import load, profile
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.settings import resolve
from kvline_server.worker.backend import open_backend


def start(
    launch: LaunchConfig,
    send: SendProgress,
    attempts: Path,
    record: Path | None,
    wait_for_neighbours: Callable[[], None],
    memory: int | None,
    root: int,
    http_processes: int = 1,
) -> tuple[Engine, Result]:
    """`memory` (bytes) and `root` (a process id) are for the CPU: the limit, and the process tree
    whose memory counts. Raises ServerError with the reason when no budget can be validated."""
    started = time.monotonic()
    send(Progress(state=State.LOADING))
    backend = open_backend(launch, memory, root, lambda text: send(Progress(warning=text)))
    device = backend.device
    model = load.read_model(launch)
    settings = resolve(launch, model, device.limit, http_processes)
    device.settle()
    free_before = device.limit - device.used()
    loaded = load.load_model(launch, model, settings, backend, send)
    result = profile.ProfileLoop(
        device=device,
        settings=settings,
        loaded=loaded,
        send=send,
        store=AttemptStore(attempts),
        record_file=record,
        wait_for_neighbours=wait_for_neighbours,
        free_before_weights=(free_before,),
    ).run(started)
    engine = Engine(
        executor=loaded.executor,
        max_running=settings.max_running_requests,
        max_step_tokens=settings.max_prefill_tokens,
        max_model_len=min(settings.wanted_len, result.kv_tokens),
        eos_token_ids=model.eos_token_ids,
        mixed_prefill_tokens=settings.mixed_prefill_tokens,
    )
    return engine, result
