"""Engines over tiny models, for tests that need no process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import torch

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.head import Head, places
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Costs, Speculation, decode_rows
from kvline_server.grammars.matchers import Matchers
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.projection import Projection
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Arena, HostArena, KVLayer, KVShape, Scales
from kvline_server.memory.device import cpu_device
from kvline_server.memory.groups import GroupedArena
from kvline_server.memory.state_arena import StateArena
from kvline_server.memory.state_shape import States
from kvline_server.memory.states import StatePool
from kvline_server.model import kv_scales
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder, cache_groups, state_shapes
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.draft_head import with_head
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker


class Free(Costs):
    """Rows that take no time: whatever can be drafted is, whatever the machine does."""

    price = 0.0

    def add(self, *numbers: float) -> None:
        """Nothing is learnt."""


class Guess(Speculation):
    """Tokens of which a model that always outputs 7 accepts some."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(7)
        self.rng = rng

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        room = sequence.limit - len(sequence.tokens) - 1
        count = min(most, 7, self.rng.randrange(8), room)
        return [7 if self.rng.random() < 0.7 else 3 for _ in range(max(0, count))]


def decoder(
    folder: Path,
    positions: int | None = None,
    kernels: TorchKernels | None = None,
    head: bool = False,
) -> Decoder:
    config = read_config(folder)
    kernels = kernels or TorchKernels()
    source = Dequantised(SafetensorsSource(folder), config.quantization)
    config = with_head(config, source) if head else config
    weights = load_weights(source, config, kernels)
    return Decoder(config, weights, positions or config.max_position, kernels)


def mapped(
    made: Decoder,
    longest: int,
    pages: int,
    kept: torch.dtype = torch.float32,
    scales: tuple[Scales, ...] = (),
    slots: int = 2,
    matrices: torch.dtype = torch.float32,
    arenas: Callable[[KVShape, int], Arena] = HostArena,
) -> GroupedArena:
    """So many pages of each group, and slots of recurrent states."""
    groups = cache_groups(made.config, longest, kept, scales)
    shapes, kernels = state_shapes(made.config), made.kernels
    states = StateArena(shapes, slots, kernels.dtype, matrices, kernels.device).layers()
    limit = pages * max(each.page_bytes for each in groups)
    arena = GroupedArena(groups, arenas, limit, states)
    arena.resize((pages,) * len(groups))
    return arena


def key_values(arena: GroupedArena) -> list[KVLayer]:
    """Of the layers that have them."""
    return [each for each in arena.layers() if isinstance(each, KVLayer)]


def engine(
    folder: Path,
    pages: int = 200,
    running: int = 8,
    step: int = 64,
    rows: int = 64,
    model_len: int = 512,
    fp8_cache: bool = False,
    kernels: TorchKernels | None = None,
    draft_tokens: int = 0,
    matchers: Matchers | None = None,
    snapshots: int = 8,
    matrices: torch.dtype = torch.float32,
    head: type[Head] | None = None,
    drafting: int | None = None,
) -> Engine:
    """With a `head`, draft tokens are those of the files' draft head. A hybrid has states for those
    of so many sequences `drafting` at once; None: of all."""
    made = decoder(folder, model_len, kernels, head is not None)
    scales: tuple[Scales, ...] = ()
    if fp8_cache:
        scales, _ = kv_scales.read(SafetensorsSource(folder), made.config)
    kept = torch.float8_e4m3fn if fp8_cache else torch.float32
    drafts = draft_tokens * (running if drafting is None else drafting)
    slots = 1 + running + snapshots + drafts
    arena = mapped(made, model_len, pages, kept, scales, slots, matrices)
    states = StatePool(running, snapshots, drafts) if made.config.recurrent else None
    hidden = places(running, draft_tokens) if head is not None else 0
    most = decode_rows(running, step, draft_tokens)
    runner = Worker(made, arena, rows, running, most, hidden)
    executor = Local(runner, cpu_device(None, os.getpid()))
    eos = made.config.eos_token_ids
    found = Engine(
        executor,
        running,
        step,
        model_len,
        eos,
        draft_tokens=draft_tokens,
        matchers=matchers,
        states=states,
        head=head(runner.draft, draft_tokens) if head is not None else None,
    )
    if found.speculation is not None:
        found.speculation.costs = Free()
    return found


def play_to_end(scheduler: Scheduler, count: int, step: Callable[[list[int]], object]) -> None:
    """Every sequence ends, each once, and no page is kept. `step` notes which have ended; without
    work it returns nothing."""
    done: list[int] = []
    for _ in range(5000):
        if scheduler.idle:
            break
        assert step(done), "there is work, but none was scheduled"
    assert sorted(done) == list(range(count))
    assert all(pool.used == 0 for pool in scheduler.caches.pools)


def plain(projection: Projection) -> torch.Tensor:
    """Its weight, which is not in fp8."""
    assert isinstance(projection.weight, torch.Tensor)
    return projection.weight


def worker(made: Engine) -> Worker:
    """The worker of an engine whose device is in this process."""
    assert isinstance(made.executor, Local)
    return made.executor.worker


def spoil(made: Engine) -> None:
    """What is in no sequence's state and in no snapshot becomes NaN."""
    states = made.caches.states
    if states is None:
        return
    kept = {*states._used, *(each.slot for each in states._of.values())}
    for layer in worker(made).arena.layers():
        if isinstance(layer, States):
            for slot in {*range(1, 1 + states.total), *states._drafts} - kept:
                layer.inputs[slot], layer.matrices[slot] = float("nan"), float("nan")


def greedy(max_tokens: int = 12, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def finish(made: Engine, limit: int = 5000) -> dict[int, list[Output]]:
    """Runs until nothing is left; outputs by sequence."""
    out: dict[int, list[Output]] = {}
    for _ in range(limit):
        if made.idle:
            return out
        for item in made.step():
            out.setdefault(item.sequence.id, []).append(item)
        made.caches.check([each.table for each in made.scheduler.running])
    raise AssertionError("the engine does not come to an end")
