"""What a launch runs on: a device's accounts, its kernels and its arena, chosen once at the start.

The GPU's modules are imported only here and only when they are asked for: the CPU's image has none
of their libraries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvline_contract.launch import Device as Kind
from kvline_contract.launch import LaunchConfig
from kvline_server import device_errors
from kvline_server.errors import DeviceFailure
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Arena, HostArena
from kvline_server.memory.device import MIB, Device, cpu_device
from kvline_server.model.config import ModelConfig

LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores
HOPPER = 9  # the compute capability that kernels are built for


@dataclass(frozen=True, slots=True)
class Backend:
    device: Device
    dtype: torch.dtype  # of weights and cache
    kernels: Callable[[ModelConfig], Kernels]
    arena: Callable[[ModelConfig, int, torch.dtype], Arena]
    libraries: tuple[str, ...]  # whose versions change a size


def open_backend(
    launch: LaunchConfig, memory: int | None, root: int, warn: Callable[[str], None]
) -> Backend:
    """`memory` and `root` are the CPU's: a limit in bytes, and the process tree to account for.
    `warn` is told what makes the kernels slower than they could be. Raises DeviceFailure."""
    if launch.device is Kind.CPU:
        device = cpu_device(memory, root)
        if not device.bounded:
            mib = device.limit // MIB
            warn(f"no container limits memory: sized for {mib} MiB, half of it free; see --memory")
        libraries = ("kvline", "torch")
        return Backend(device, torch.float32, lambda _: TorchKernels(), HostArena, libraries)
    return _cuda(launch, warn)


def _cuda(launch: LaunchConfig, warn: Callable[[str], None]) -> Backend:
    if not torch.cuda.is_available():
        raise DeviceFailure("spec.resources.gpus asks for a GPU, and CUDA finds none here")
    if launch.tensor_parallel != 1:
        raise DeviceFailure(
            f"spec.resources.gpus is {launch.tensor_parallel}; this version runs on one GPU"
        )
    capability = torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        raise DeviceFailure(
            f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}."
            f"{capability[1]}, at least {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} is needed"
        )
    from kvline_server.memory.cuda import CudaArena, CudaDevice

    libraries = ("kvline", "torch", "flashinfer-python")
    kernels = partial(_cuda_kernels, warn)
    try:
        device = CudaDevice()
    except RuntimeError as error:  # a GPU without room for one more context, or a broken one
        raise DeviceFailure(f"the GPU cannot be used: {str(error).splitlines()[0]}") from error
    return Backend(device, torch.bfloat16, kernels, CudaArena, libraries)


def _cuda_kernels(warn: Callable[[str], None], model: ModelConfig) -> Kernels:
    """FlashInfer's where they were built for this GPU and model, else torch's own, and a warning:
    a server that is slower than it could be must say so."""
    # Its other norms are compiled at the first call, which a pod without a compiler cannot.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    capability = torch.cuda.get_device_capability(0)
    if capability[0] != HOPPER:
        why = f"compute capability {capability[0]}.{capability[1]} is not {HOPPER}.x"
    else:
        try:
            from kvline_server.kernels.flashinfer import FlashInferKernels

            with device_errors.named("kernels"):  # whose errors are no lack of kernels
                return FlashInferKernels(model)
        except (ImportError, RuntimeError) as error:
            why = str(error).splitlines()[0]
    warn(f"no prebuilt kernels for this GPU and model, torch's slower ones serve: {why}")
    return TorchKernels(torch.bfloat16, device="cuda")
