"""From a launch configuration to an engine with a validated KV budget: load, profile, build."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvline_contract import times
from kvline_contract.launch import Device, LaunchConfig
from kvline_contract.memory import COLLECTIVES
from kvline_contract.progress import WAITS_FOR_HTTP
from kvline_contract.report import START_STAGES, Current, Result, Stage
from kvline_server.engine.encoding import Encoding
from kvline_server.engine.engine import Engine
from kvline_server.grammars.matchers import Matchers
from kvline_server.ipc.messages import Progress, RankLoaded, SendProgress
from kvline_server.kernels.group import ALONE, Group
from kvline_server.model.config import ModelConfig
from kvline_server.options.arguments import GrammarService, SharedByRanks
from kvline_server.options.options import Options
from kvline_server.options.timeouts import LONGEST_STEP
from kvline_server.parallel import wire
from kvline_server.parallel.connect import connect
from kvline_server.parallel.executor import Local
from kvline_server.parallel.join import join
from kvline_server.parallel.link import Link
from kvline_server.sizing import images, load, notes, pace, profile
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.running import open_to_sizing
from kvline_server.sizing.settings import EngineSettings, resolve
from kvline_server.worker.backend import Backend, open_backend
from kvline_server.worker.graphs.steps import most_rows

ATTACH_SECONDS = 1.0  # that a start waits for the process that fills masks


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank's process, once its part of the model is on its device."""

    backend: Backend
    model: ModelConfig
    settings: EngineSettings
    loaded: Loaded
    free_before: int  # bytes, before it met the others and loaded its weights
    group: Group
    collectives: int  # bytes that the exchange with the others takes of its GPU

    @property
    def local(self) -> Local:
        assert isinstance(self.loaded.executor, Local), "the rank's own"
        return self.loaded.executor

    def message(self) -> RankLoaded:
        device = self.backend.device
        return RankLoaded(
            pid=os.getpid(),
            limit=device.limit,
            free_before=self.free_before,
            collectives=self.collectives,
            encoder=self.settings.encoder_bytes,
            pace=self.settings.encoder_pace,
            device=device.name,
            kernels=type(self.local.worker.kernels).__name__,
            fingerprint=self.loaded.fingerprint,
        )

    def steps(self, ranks: SharedByRanks) -> wire.Steps:
        settings, model = self.settings, self.model
        size = wire.step_bytes(
            settings.max_prefill_tokens,
            settings.max_running_requests,
            settings.wanted_len,
            model.vocabulary,
            ranks.count,
            len(self.loaded.groups),
        )
        return wire.Steps(ranks.steps_fd, size, self.local.depth + 1, ranks.count - 1)


def load_rank(
    launch: LaunchConfig,
    send: SendProgress,
    memory: int | None,
    root: int,
    http_processes: int = 1,
    ranks: SharedByRanks | None = None,
    rank: int = 0,
    wait_for_neighbours: Callable[[], object] | None = None,
) -> LoadedRank:
    """`memory` (bytes) and `root` (a process id) are for the CPU: the limit, and the process tree
    whose memory counts; where settings depend on what it leaves, it is waited for, by rank 0. Ranks
    meet before they load: where one cannot, the parent ends all. Raises ServerError."""

    def warn(text: str) -> None:
        send(Progress(warning=text))

    backend = open_backend(launch, memory, root, warn, rank)
    device = backend.device
    model = load.read_model(launch)
    settings = resolve(launch, model, device.limit, http_processes)
    sees, warning = images.asked(launch, model, settings.wanted_len)
    settings = settings.seeing(sees)
    for text in filter(None, (warning, notes.raised(launch, settings))):
        if rank == 0:
            warn(text)
    device.settle()
    free_before = device.limit - device.used()
    group: Group = ALONE
    taken = 0
    if ranks is not None:
        # What torch's own allocator takes meanwhile is the rank's, not the exchange's.
        began, before = time.monotonic(), device.used() - device.now()
        # Graphs of decodes may have more rows than decodes have.
        rows = max(settings.max_prefill_tokens, most_rows(settings.decode_rows))
        shared = launch.device, rank, ranks.count, ranks.folder
        group = connect(*shared, rows * model.hidden, backend.dtype, warn)
        taken = max(0, device.used() - device.now() - before) if device.gpu else 0
        ms = round((time.monotonic() - began) * 1000)
        send(Progress(stage=Stage(COLLECTIVES, ms, taken)))
    if wait_for_neighbours and not device.gpu and open_to_sizing(launch, model, settings):
        what, name = "loads the model", WAITS_FOR_HTTP
        send(Progress(current=Current(1, START_STAGES, what, times.now(), name=name)))
        wait_for_neighbours()
        send(Progress(current=Current(1, START_STAGES, what, times.now())))
    loaded, settings = load.load_model(launch, model, settings, backend, send, group, taken)
    return LoadedRank(backend, model, settings, loaded, free_before, group, taken)


def start(
    launch: LaunchConfig,
    send: SendProgress,
    attempts: Path,
    record: Path | None,
    wait_for_neighbours: Callable[[], object],
    memory: int | None,
    root: int,
    http_processes: int = 1,
    ranks: SharedByRanks | None = None,
    links: Sequence[Link] = (),
    longest_step: float = LONGEST_STEP,
    grammars: GrammarService | None = None,
) -> tuple[Engine, Result]:
    """Rank 0's; `links` are to the other `ranks`; a step may take `longest_step` seconds. Raises
    ServerError with the reason when no budget can be validated."""
    started = time.monotonic()
    given = launch, send, memory, root, http_processes, ranks
    rank = load_rank(*given, wait_for_neighbours=wait_for_neighbours)
    settings, loaded, device = rank.settings, rank.loaded, rank.backend.device
    free: tuple[int, ...] = (rank.free_before,)
    steps: wire.Steps | None = None
    if ranks is not None:
        steps = rank.steps(ranks)
        joined = join(rank.local, rank.group, links, steps, rank.message())
        loaded, free = loaded.on(joined.executor, joined.collectives), joined.free_before
        settings = replace(settings, encoder_bytes=joined.encoder, encoder_pace=joined.pace)
    pace.check_layer(settings, longest_step)
    result = profile.ProfileLoop(
        device=device,
        settings=settings,
        loaded=loaded,
        send=send,
        store=AttemptStore(attempts),
        record_file=record,
        wait_for_neighbours=wait_for_neighbours,
        free_before_weights=free,
        longest_step=longest_step,
    ).run(started)
    if steps is not None:
        steps.trim()  # of the validation, whose steps are the largest
    engine = Engine(
        executor=loaded.executor,
        max_running=settings.max_running_requests,
        max_step_tokens=settings.max_prefill_tokens,
        max_model_len=min(settings.wanted_len, result.kv_tokens),
        eos_token_ids=rank.model.eos_token_ids,
        mixed_prefill_tokens=settings.mixed_prefill_tokens,
        draft_tokens=settings.draft_tokens,
        matchers=None if grammars is None else _matchers(grammars, settings),
        states=loaded.slots.pool(),
        encoding=_encoding(loaded, settings),
        axes=bool(rank.model.rope.axes),
    )
    return engine, result


def _encoding(loaded: Loaded, settings: EngineSettings) -> Encoding | None:
    executor = loaded.executor
    if executor.encoder is None or settings.images is None:
        return None
    chunk = settings.max_prefill_tokens
    bounds = replace(settings.images.bounds(chunk), slice=images.slice_of(settings.encoder_pace))
    two_way, ranks = settings.images.vision.two_way, executor.ranks
    return Encoding(executor.encoder, bounds, chunk, loaded.vocabulary, ranks, two_way)


def _matchers(grammars: GrammarService, settings: EngineSettings) -> Matchers:
    rows = settings.decode_rows  # no step has more sampled ones
    made = Matchers(str(grammars.path), grammars.rows_fd, rows)
    made.attach(ATTACH_SECONDS)
    return made


def set_threads(options: Options, launch: LaunchConfig) -> None:
    """Ranks on a CPU share its cores."""
    threads = options.threads
    if launch.device is Device.CPU and launch.tensor_parallel > 1:
        threads = max(1, (threads or torch.get_num_threads()) // launch.tensor_parallel)
    if threads:
        torch.set_num_threads(threads)
