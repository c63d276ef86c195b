"""Loads a model onto the device: config, checks, weights, fingerprint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kvline_contract.launch import LaunchConfig, LoadFormat, StateDtype
from kvline_contract.memory import WEIGHTS
from kvline_contract.report import Provenance, Stage
from kvline_server.engine.stress.owners import StressSet
from kvline_server.errors import DeviceOutOfMemory, ModelNotFound
from kvline_server.ipc.messages import Progress, SendProgress
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.interface import Kernels
from kvline_server.memory import device_errors
from kvline_server.memory import parts as parts_of
from kvline_server.memory.arena import Scales
from kvline_server.memory.device import MIB, Device, compact_heap
from kvline_server.memory.groups import CacheGroup, GroupedArena, order, parts
from kvline_server.memory.parts import OwnedPart
from kvline_server.memory.state_shape import States
from kvline_server.model import devices, kv_scales, loader
from kvline_server.model.config import ModelConfig, read_config
from kvline_server.model.decoder import Decoder, cache_groups, state_shapes
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.files import identity
from kvline_server.model.linear import TensorSource
from kvline_server.model.shard import Shard, local
from kvline_server.parallel.executor import Local
from kvline_server.sizing import images, notes, reserve
from kvline_server.sizing.diagnosis import Diagnosis
from kvline_server.sizing.loaded import Loaded, exchanged
from kvline_server.sizing.record import fingerprint
from kvline_server.sizing.running import bounded, left, open_to_sizing
from kvline_server.sizing.settings import EngineSettings, encoder_work
from kvline_server.worker.backend import Backend
from kvline_server.worker.worker import Worker

REPORT_SECONDS = 1.0


def read_model(launch: LaunchConfig) -> ModelConfig:
    folder = Path(launch.model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"{folder}: no such folder (spec.model.source {launch.model.source})")
    model = read_config(folder)
    devices.check(model, launch.device)
    return model


def load_model(
    launch: LaunchConfig,
    model: ModelConfig,
    settings: EngineSettings,
    backend: Backend,
    send: SendProgress,
    group: Group = ALONE,
    collectives: int = 0,
) -> tuple[Loaded, EngineSettings]:
    """Step 2 of the profile loop, for this rank of the group, whose `collectives` are in bytes. The
    settings have fewer running requests where more would leave too little to the KV cache. Raises
    ModelInvalid, or OutOfMemory where weights do not fit, before the OOM killer acts."""
    device = backend.device
    started, before, used = time.monotonic(), device.now(), device.used()
    source = _source(launch, model)
    shard = Shard(group.rank, group.ranks)
    expected, mine = _checked(source, model, shard, settings, backend.dtype), local(model, shard)
    try:
        with device_errors.translated("load"), compact_heap():
            windows = tuple(order(model.every_window, settings.wanted_len))
            kernels = backend.kernels(mine, group, windows, settings.vision)
            expected = _checked(source, model, shard, settings, backend.dtype, kernels)
            if expected > device.limit - used:
                raise DeviceOutOfMemory("load: the weights are larger than what is free")
            cache, missing = _cache(source, model, group, backend, settings.wanted_len)
            shapes = state_shapes(mine)
            state = reserve.slot_bytes(shapes, backend.dtype, settings.state_dtype)
            owned = OwnedPart(WEIGHTS, fixed=expected), exchanged(collectives)
            settings = _sized(launch, model, settings, device, kernels, cache, owned, state)
            slots = reserve.slots(shapes, model, settings, backend.dtype)
            rank = _diagnosis(backend, settings, owned, used - collectives, group)
            reserve.check(slots, rank, device.limit - used - expected)
            copied = _LoadProgress(send, started)
            states = partial(reserve.states, shapes, slots, rank, kernels)
            worker = _build(source, model, cache, settings, backend, kernels, copied, states)
            found = notes.warnings(source, model, backend, worker, settings.images)
            notes.warn(group, send, missing, *found)
            del source
            device.settle()
            encoder, work, pace = images.opened(settings.images, worker.decoder, device, send)
            free = 0 if kernels.encoder.keeps_memory else work
            settings = replace(settings, encoder_bytes=free, encoder_pace=pace)
    except DeviceOutOfMemory as error:
        owned = OwnedPart(WEIGHTS, fixed=expected), exchanged(collectives)
        rank = _diagnosis(backend, settings, owned, used - collectives, group)
        raise rank.weights_do_not_fit(device.limit - used) from error
    kept = notes.kept(launch, worker.decoder.weights)
    provenance = _report(launch, backend, kept, started, before, send)
    return Loaded(
        executor=Local(worker, device, encoder),
        vocabulary=model.vocabulary,
        owned=(*_parts(worker.decoder.weights, settings, work), *slots.parts(), *parts(cache)),
        groups=cache,
        slots=slots,
        stress=StressSet.of(worker, settings.whole_image),
        fingerprint=_fingerprint(launch, settings, provenance, device, worker.kernels),
        cache_dtype=notes.name(backend.cache_dtype),
        note=backend.note,
        windowed=any(model.windows),
    ), settings


def _checked(
    source: TensorSource,
    model: ModelConfig,
    shard: Shard,
    settings: EngineSettings,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
) -> int:
    """Bytes of what a rank loads, with an encoder's cache. Raises ModelInvalid."""
    sees = settings.images
    found = loader.checked(source, model, shard, kernels, None if sees is None else sees.vision)
    return found.nbytes(dtype) + parts_of.loaded(_of_encoder(settings, dtype))


def _parts(weights: loader.Weights, settings: EngineSettings, work: int) -> tuple[OwnedPart, ...]:
    """`work`: bytes of the encoder's passes, which are its own where none are to stay free."""
    passes = encoder_work(work - settings.encoder_bytes, lent=False)
    return *weights.parts(), *_of_encoder(settings, weights.embedding.dtype), *passes


def _of_encoder(settings: EngineSettings, dtype: torch.dtype) -> tuple[OwnedPart, ...]:
    return images.owned(settings.images, settings.max_prefill_tokens, dtype)


def _report(
    launch: LaunchConfig,
    backend: Backend,
    details: list[str],
    started: float,
    before: int,
    send: SendProgress,
) -> Provenance:
    """What was loaded, since when and beside how many bytes, and from what."""
    notes, device = [backend.note] if backend.note else [], backend.device
    ms, taken = round((time.monotonic() - started) * 1000), device.now() - before
    send(Progress(stage=Stage("load", ms, taken, ", ".join(details + notes) or None)))
    which = launch.image, model_revision(launch), backend.libraries
    provenance = Provenance(device.name, device.driver, *which)
    send(Progress(provenance=provenance))
    return provenance


def _sized(
    launch: LaunchConfig,
    model: ModelConfig,
    settings: EngineSettings,
    device: Device,
    kernels: Kernels,
    cache: tuple[CacheGroup, ...],
    owned: tuple[OwnedPart, ...],
    state: int,
) -> EngineSettings:
    """With what depends on the kernels, and on what is left beside what is loaded, of which a slot
    of recurrent states takes `state` bytes."""
    rows, queries = 1 + settings.draft_tokens, model.heads // model.kv_heads
    page = kernels.attention.table_page_bytes(rows, queries)
    settings = settings.with_tables(page, len(set(model.windows)))
    if not open_to_sizing(launch, model, settings):
        return settings
    remains = left(device, settings, parts_of.loaded(owned), model.vocabulary)
    running = _least(bounded(settings, parts(cache), remains, state), kernels)
    return settings.changed(max_running_requests=running)


def _least(running: int, kernels: Kernels) -> int:
    """Of all ranks: their devices may differ by a little."""
    own = torch.tensor([running], device=kernels.device)
    return int(kernels.group.all_gather(own).min())


def _diagnosis(
    backend: Backend,
    settings: EngineSettings,
    owned: tuple[OwnedPart, ...],
    others: int,
    group: Group,
) -> Diagnosis:
    return Diagnosis(
        device=backend.device,
        settings=settings,
        owned=owned,
        neighbours=others,
        rank=group.rank,
        ranks=group.ranks,
        note=backend.note,
    )


def _fingerprint(
    launch: LaunchConfig,
    settings: EngineSettings,
    provenance: Provenance,
    device: Device,
    kernels: Kernels,
) -> str:
    with_weights = launch.model.load_format is not LoadFormat.RANDOM
    model = provenance.model_revision or identity(Path(launch.model.path), with_weights)
    return fingerprint(
        {
            "model": model,
            "loadFormat": str(launch.model.load_format),
            "settings": repr(settings),
            "device": provenance.gpu,
            "kernels": type(kernels).__name__,
            "build": kernels.build,
            "totalMiB": device.limit // MIB,
            "tensorParallel": launch.tensor_parallel,
            "driver": provenance.driver,
            **provenance.libraries,
            **_exchange(kernels.group),
            **_asked(launch),
            **({"draftTokens": settings.draft_tokens} if settings.draft_tokens else {}),
            **(_states(settings) if settings.recurrent else {}),
            **({"imagePatches": settings.images.patches} if settings.images else {}),
            **({} if device.gpu else _processors()),
        }
    )


def _states(settings: EngineSettings) -> dict[str, str | int]:
    """Without the default dtype, so that records of before there was a choice stay."""
    other = (
        {} if settings.state_dtype is StateDtype.FLOAT32 else {"stateDtype": settings.state_dtype}
    )
    drafts = {"draftStates": settings.draft_states} if settings.draft_states else {}
    return {"snapshots": settings.snapshots, **drafts, **other}


def _exchange(group: Group) -> dict[str, str | int]:
    """NCCL takes a GiB more of each GPU than memory that they share."""
    return {"exchange": type(group).__name__} if group.ranks > 1 else {}


def _asked(launch: LaunchConfig) -> dict[str, str | int]:
    """Only where the spec asks for it, so that records of other services stay."""
    given = {"cpuLimit": launch.cpu_limit or ""}
    given |= {f"env {name}": value for name, value in (launch.environment or {}).items()}
    return {name: value for name, value in given.items() if value}


def _processors() -> dict[str, str | int]:
    """On the CPU alone, as a GPU's sizes do not depend on them. Each thread has buffers of its own,
    and weights are packed for the instructions that there are."""
    return {
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _source(launch: LaunchConfig, model: ModelConfig) -> TensorSource:
    if launch.model.load_format is LoadFormat.RANDOM:
        return loader.RandomSource(model.quantization)
    return Dequantised(loader.SafetensorsSource(Path(launch.model.path)), model.quantization)


def _cache(
    source: TensorSource,
    model: ModelConfig,
    group: Group,
    backend: Backend,
    longest: int,
) -> tuple[tuple[CacheGroup, ...], str]:
    """What this rank's layers keep of sequences of up to `longest` tokens, and a warning where an
    fp8 cache has not all its scales. All ranks have the same scales; random weights need none.
    Raises ModelInvalid."""
    mine = local(model, Shard(group.rank, group.ranks))
    scales: tuple[Scales, ...] = ()
    missing = 0
    if backend.cache_dtype != backend.dtype and isinstance(source, Dequantised):
        scales, missing = kv_scales.read(source.files, model)
    warning = (
        f"spec.engine.kvCacheDtype is fp8, and the model's files lack {missing} of the "
        f"{2 * len(model.attentions)} scales of its keys and values (self_attn.k_scale and "
        "v_scale): 1.0 is taken for each, and numbers beyond 448 become 448. Compare answers with "
        "those of kvCacheDtype auto, or serve a checkpoint that was calibrated for an fp8 KV cache"
    )
    made = cache_groups(mine, longest, backend.cache_dtype, scales)
    return made, warning if missing else ""


class _LoadProgress:
    """Reports progress at most once a second, so that a slow volume does not count as stalled."""

    def __init__(self, send: SendProgress, started: float) -> None:
        self.send = send
        self.started = self.reported = started

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.reported >= REPORT_SECONDS:
            self.reported = now
            ms = round((now - self.started) * 1000)
            self.send(Progress(stage=Stage("load", ms, done, total_bytes=total)))


def _build(
    source: TensorSource,
    model: ModelConfig,
    cache: tuple[CacheGroup, ...],
    settings: EngineSettings,
    backend: Backend,
    kernels: Kernels,
    copied: Callable[[int, int], None],
    states: Callable[[], list[States]],
) -> Worker:
    """Weights, recurrent states, KV arena (addresses only) and decoder of this rank."""
    shard = Shard(kernels.group.rank, kernels.group.ranks)
    mine = local(model, shard)
    sees, chunk = settings.images, settings.max_prefill_tokens
    vision, rows = (sees.vision, sees.bounds(chunk).cached) if sees else (None, 0)
    weights = loader.load_weights(source, model, kernels, copied, shard, vision, rows)
    arena = GroupedArena(cache, backend.arena, backend.device.limit, states())
    of_images = (chunk, len(sees.vision.deepstack)) if sees else (0, 0)
    decoder = Decoder(mine, weights, settings.wanted_len, kernels, *of_images)
    running, rows = settings.max_running_requests, settings.decode_rows
    return Worker(decoder, arena, settings.logprob_rows, running, rows)


def model_revision(launch: LaunchConfig) -> str:
    """The commit of an hf:// source; empty for a folder, which is identified by its contents."""
    source = launch.model.source
    return source.rpartition("@")[2] if source.startswith("hf://") else ""
