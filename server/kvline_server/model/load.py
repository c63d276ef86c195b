"""From a LaunchConfig to a model on the device: read, check, copy, fingerprint."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch

from kvline_contract.launch import LaunchConfig, LoadFormat
from kvline_contract.report import Provenance
from kvline_server.backend import Backend
from kvline_server.config import EngineSettings
from kvline_server.engine.runner import Runner
from kvline_server.errors import DeviceOutOfMemory, ModelNotFound
from kvline_server.memory.device import MIB
from kvline_server.memory.diagnosis import Diagnosis
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.profile import Loaded
from kvline_server.memory.record import fingerprint
from kvline_server.model.config import ModelConfig, read_config
from kvline_server.model.decoder import Decoder
from kvline_server.model.loader import (
    RandomSource,
    SafetensorsSource,
    TensorSource,
    identity,
    load_weights,
)


class Progress(Protocol):
    def stage(self, name: str, ms: int, nbytes: int, detail: str | None = None) -> None: ...

    def provenance(self, provenance: Provenance) -> None: ...

    def warn(self, text: str) -> None: ...


def read_model(launch: LaunchConfig) -> ModelConfig:
    folder = Path(launch.model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"{folder}: no such folder (spec.model.source {launch.model.source})")
    return read_config(folder)


def load_model(
    launch: LaunchConfig,
    model: ModelConfig,
    settings: EngineSettings,
    backend: Backend,
    progress: Progress,
) -> Loaded:
    """Step 1 of the profile loop. Raises ModelInvalid, or OutOfMemory before the kernel kills."""
    device = backend.device
    started, before, used = time.monotonic(), device.now(), device.used()
    folder = Path(launch.model.path)
    random = launch.model.load_format is LoadFormat.RANDOM
    source: TensorSource = RandomSource() if random else SafetensorsSource(folder)
    expected = weight_elements(model) * backend.dtype.itemsize
    too_large = Diagnosis(device, settings, expected, used).weights_do_not_fit(device.limit - used)
    if expected > device.limit - used:
        raise too_large
    try:
        kernels = backend.kernels(model)
        weights = load_weights(source, model, kernels)
    except (MemoryError, DeviceOutOfMemory, torch.OutOfMemoryError) as error:
        raise too_large from error
    del source
    device.settle()
    bytes_per_token = model.kv_bytes_per_token(kernels.dtype.itemsize)
    arena = backend.arena(model, device.limit // (bytes_per_token * PAGE_SIZE) + 2, kernels.dtype)
    decoder = Decoder(model, weights, settings.wanted_len, kernels)
    ms = round((time.monotonic() - started) * 1000)
    progress.stage("load", ms, device.now() - before, "random" if random else None)
    libraries = {name: version(name) for name in backend.libraries}
    progress.provenance(
        Provenance(
            gpu=device.name,
            driver=device.driver,
            image=launch.image,
            model_revision=model_revision(launch),
            libraries=libraries,
        )
    )
    return Loaded(
        runner=Runner(decoder, arena, settings.logprob_rows, settings.max_running_requests),
        arena=arena,
        bytes_per_token=bytes_per_token,
        weights_bytes=weights.nbytes(),
        fingerprint=fingerprint(
            {
                "model": model_revision(launch) or identity(folder, with_weights=not random),
                "loadFormat": str(launch.model.load_format),
                "settings": repr(settings),
                "device": device.name,
                "kernels": type(kernels).__name__,
                "totalMiB": device.limit // MIB,
                "tensorParallel": launch.tensor_parallel,
                "driver": device.driver,
                **libraries,
            }
        ),
    )


def model_revision(launch: LaunchConfig) -> str:
    """The hub commit of an hf:// source; empty for a folder, which is known by its contents."""
    source = launch.model.source
    return source.rpartition("@")[2] if source.startswith("hf://") else ""


def weight_elements(model: ModelConfig) -> int:
    """Elements of all large tensors, from the shapes alone."""
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim * model.hidden
    mlp = 3 * model.hidden * model.intermediate
    tables = model.vocabulary * model.hidden * (1 if model.tied_embeddings else 2)
    return model.layers * (attention + mlp) + tables
