"""What a start says of a model as it was loaded."""

from __future__ import annotations

import torch

from kvline_contract.launch import LaunchConfig, LoadFormat
from kvline_contract.memory import EXPERTS, SCALES
from kvline_server.ipc.messages import Progress, SendProgress
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.group import Group
from kvline_server.kernels.interface import Kernels
from kvline_server.memory.device import MIB
from kvline_server.model import loader
from kvline_server.model.config import ModelConfig
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.linear import TensorSource
from kvline_server.sizing.images import Images
from kvline_server.sizing.settings import EngineSettings
from kvline_server.worker.backend import Backend
from kvline_server.worker.worker import Worker


def warn(group: Group, send: SendProgress, *warnings: str) -> None:
    """By the first rank, as all have the same; some may be empty."""
    for text in filter(None, warnings):
        if group.rank == 0:
            send(Progress(warning=text))


def kept(launch: LaunchConfig, weights: loader.Weights) -> list[str]:
    """For the stage's detail: what is random, and what stays in fp8 or in 4 bits."""
    made = ["random"] if launch.model.load_format is LoadFormat.RANDOM else []
    parts = {part.name: part.fixed for part in weights.parts()}
    scales = parts.get(SCALES, 0) - weights.expert_scales
    if weights.counts[FP8]:
        made.append(_stays(weights.counts[FP8], "weights in fp8", scales))
    if weights.expert_scales:
        made.append(_stays(parts[EXPERTS], "experts in MXFP4", weights.expert_scales))
    return made


def _stays(nbytes: int, what: str, scales: int) -> str:
    return f"{nbytes // MIB} MiB of {what} with {scales // MIB} MiB of scales"


def raised(launch: LaunchConfig, settings: EngineSettings) -> str:
    """Where steps have more rows than asked for; else empty."""
    asked, rows = launch.engine.max_prefill_tokens, settings.max_prefill_tokens
    if asked is None or asked >= rows:
        return ""
    return (
        f"spec.engine.maxPrefillTokens is {asked}, and steps have up to {rows} rows: an image of "
        "this model is computed in one step, beside the decodes of other requests"
    )


def warnings(
    source: TensorSource,
    model: ModelConfig,
    backend: Backend,
    worker: Worker,
    images: Images | None,
) -> tuple[str, ...]:
    """Of a model as it was loaded; some are empty."""
    vision = None if images is None else images.vision
    slow = _slow_experts(worker.decoder.weights, worker.kernels)
    return _dequantised(source, backend), slow, loader.left_out(source, model, vision)


def _slow_experts(weights: loader.Weights, kernels: Kernels) -> str:
    """A warning where it is so."""
    if not weights.expert_scales or not kernels.experts.dequantises:
        return ""
    return (
        "experts in MXFP4 are dequantised in every step here, which takes several times as long as "
        "experts in float32 for few tokens; kernels of a GPU with compute capability 9.0 do not"
    )


def _dequantised(source: TensorSource, backend: Backend) -> str:
    """A warning where it is so."""
    if not isinstance(source, Dequantised):
        return ""
    sizes = {name: n for name, n in source.quantised.items() if name not in source.kept}
    if not sizes:
        return ""
    elements, itemsize = sum(sizes.values()), backend.dtype.itemsize
    text = (
        f"fp8 weights are dequantised to {name(backend.dtype)} as they load: {elements // MIB} "
        f"MiB in the files take {elements * itemsize // MIB} MiB"
    )
    if source.kept:
        text += f"; {len(sizes)} tensors of {len(source.quantised)}, {next(iter(sizes))} the first"
    return text


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
