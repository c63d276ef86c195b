"""Selects the backend of a launch: memory accounting, kernels and KV arena of the CPU or the GPU.

GPU modules are imported only here and only for a GPU: the CPU image has none of their libraries.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from kvline_contract.launch import Device as Kind
from kvline_contract.launch import KVCacheDtype, LaunchConfig
from kvline_server.errors import DeviceFailure
from kvline_server.kernels.group import Group
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory import device_errors
from kvline_server.memory.arena import Arena, HostArena, KVShape
from kvline_server.memory.device import MIB, Device, cpu_device, unbounded
from kvline_server.model.config import ModelConfig
from kvline_server.model.vision.config import VisionConfig

MIN_CAPABILITY = (8, 0)  # bfloat16 on tensor cores
HOPPER = 9  # the compute capability that kernels are built for
LARGEST_STUB = 1 << 20  # bytes; the library has hundreds of MiB
GPU_BUILD = (
    "this torch has CUDA's libraries, unlike the CPU image's; the process has {} MiB before its "
    "weights"
)


@dataclass(frozen=True, slots=True)
class Backend:
    device: Device
    dtype: torch.dtype  # of weights and hidden states
    cache_dtype: torch.dtype  # of the KV cache
    # Of a rank's share of the model, the windows of its groups of layers, and an encoder of images.
    kernels: Callable[[ModelConfig, Group, tuple[int, ...], VisionConfig | None], Kernels]
    arena: Callable[[KVShape, int], Arena]
    libraries: dict[str, str]  # their versions, which are part of the fingerprint
    note: str = ""  # on what differs from the image, and so does the size


def open_backend(
    launch: LaunchConfig,
    memory: int | None,
    root: int,
    warn: Callable[[str], None],
    rank: int = 0,
) -> Backend:
    """`memory` (bytes) and `root` (a process id) are for the CPU: the limit of all ranks, and the
    process tree whose memory counts. `warn` gets a text for each fallback that costs speed or
    memory. Raises DeviceFailure."""
    if launch.device is Kind.CPU:
        device = cpu_device(memory, root, launch.tensor_parallel)
        if not device.bounded:
            warn(unbounded(device.limit))
        dtype = torch.float32
        cache = cache_dtype(launch, dtype)
        found, note = cpu_libraries(for_gpus()), GPU_BUILD.format(device.now() // MIB)
        note = note if for_gpus() else ""
        return Backend(device, dtype, cache, _cpu_kernels, HostArena, found, note)
    return _cuda(launch, warn, rank)


def for_gpus(libraries: Path = Path(torch.__file__).parent / "lib") -> bool:
    """Whether torch has the libraries for GPUs, which the CPU image leaves out of the same version,
    with a stub of a few KiB in their place (docs/decisions/028)."""
    library = libraries / "libtorch_cuda.so"
    return library.exists() and library.stat().st_size > LARGEST_STUB


def cpu_libraries(gpu_build: bool) -> dict[str, str]:
    torch_version = version("torch") + (" for GPUs" if gpu_build else "")
    return {"kvline": version("kvline"), "torch": torch_version}


def cache_dtype(launch: LaunchConfig, dtype: torch.dtype) -> torch.dtype:
    """`dtype` is that of the model's computation."""
    return torch.float8_e4m3fn if launch.engine.kv_cache_dtype is KVCacheDtype.FP8 else dtype


def gpu(rank: int, ranks: int) -> str:
    """Its name in messages."""
    return "the GPU" if ranks == 1 else f"GPU {rank}"


def _cpu_kernels(
    model: ModelConfig, group: Group, windows: tuple[int, ...], vision: VisionConfig | None
) -> Kernels:
    return TorchKernels(group=group)


def _driver() -> str:
    """What of the node's driver this process sees, for a message."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "the driver's libcuda.so.1 cannot be loaded: check that NVIDIA's driver is installed, "
            "and that a device plug-in or container toolkit brings it into a container"
        )
    return "the driver's libcuda.so.1 is there, but no device: check the node with nvidia-smi"


def _cuda(launch: LaunchConfig, warn: Callable[[str], None], rank: int) -> Backend:
    if not torch.cuda.is_available():
        raise DeviceFailure(
            f"spec.resources.gpus asks for a GPU, and CUDA finds none on this machine; {_driver()}"
        )
    asked, seen = launch.tensor_parallel, torch.cuda.device_count()
    if seen < asked:
        raise DeviceFailure(
            f"spec.resources.gpus is {asked}, and this machine shows {seen} of them"
        )
    capability = torch.cuda.get_device_capability(rank)
    if capability < MIN_CAPABILITY:
        raise DeviceFailure(
            f"{torch.cuda.get_device_name(rank)} has compute capability {capability[0]}."
            f"{capability[1]}, at least {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is needed"
        )
    from kvline_server.memory.cuda import CudaArena, CudaDevice

    libraries = {name: version(name) for name in ("kvline", "torch", "flashinfer-python")}
    dtype = torch.bfloat16
    cache = cache_dtype(launch, dtype)
    kernels = partial(_cuda_kernels, warn, cache)
    try:
        torch.cuda.set_device(rank)
        device = CudaDevice()
    except RuntimeError as error:  # no memory for another CUDA context, or a broken GPU
        text = str(error).splitlines()[0]
        raise DeviceFailure(f"{gpu(rank, asked)} cannot be used: {text}") from error
    return Backend(device, dtype, cache, kernels, CudaArena, libraries)


def _cuda_kernels(
    warn: Callable[[str], None],
    cache: torch.dtype,
    model: ModelConfig,
    group: Group,
    windows: tuple[int, ...],
    vision: VisionConfig | None,
) -> Kernels:
    """FlashInfer's where they were built for this GPU and model, else torch's with a warning."""
    # FlashInfer's other norm kernels are compiled at first use, and a pod has no compiler.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    capability = torch.cuda.get_device_capability()
    if capability[0] != HOPPER:
        why = f"compute capability {capability[0]}.{capability[1]} is not {HOPPER}.x"
    else:
        try:
            from kvline_server.kernels import cuda_experts, cuda_mxfp4, cuda_write
            from kvline_server.kernels.flashinfer import FlashInferKernels

            shape = model.heads, model.kv_heads, model.head_dim
            for rope in {model.rope_of(layer) for layer in model.attentions.values()}:
                rotary = (rope.rotary_dim or model.head_dim) if model.rotates else 0
                cuda_write.check(*shape, rotary)
            if (many := model.experts) is not None:
                width = many.latent or model.hidden, model.expert_width
                cuda_experts.check(many.count, many.chosen, *width)
                cuda_mxfp4.check(many.mxfp4, many.stacked, model.hidden, model.intermediate)
            with device_errors.translated("kernels"):  # a device error is no missing kernel
                of_images = (vision.two_way, vision.head_dim) if vision else (False, 0)
                return FlashInferKernels(*shape, group, cache, windows, *of_images)
        except (ImportError, RuntimeError, OSError) as error:  # OSError: files are missing
            why = str(error).splitlines()[0]
    warn(f"no prebuilt kernels for this GPU and model, using torch's slower ones: {why}")
    return TorchKernels(torch.bfloat16, device="cuda", group=group)
