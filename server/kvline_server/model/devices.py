"""Which devices a model is served on. Imports no torch: the launch is checked with it."""

from __future__ import annotations

from kvline_contract.launch import Device
from kvline_server.errors import ModelUnsupported
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import Mamba2

# Of heads, by which the kernels of recurrent layers are built, and of their convolutions.
HEAD_DIM, SCAN, WIDTH = 128, (64, 128), 4


def check(config: ModelConfig, device: Device) -> None:
    """Raises ModelUnsupported, before any weights are read."""
    if device is not Device.CPU and (what := _on_cpus_alone(config)):
        raise ModelUnsupported(
            f"{config.architecture} has {what}, which are served on CPUs only at present: leave "
            "out spec.resources.gpus"
        )


def _on_cpus_alone(config: ModelConfig) -> str:
    """What no kernels of GPUs compute; empty where there is nothing."""
    recurrent = config.recurrent
    if recurrent is None:
        return ""
    if isinstance(recurrent, Mamba2):
        if (recurrent.head_dim, recurrent.state_dim) != SCAN:
            return f"Mamba2 layers whose heads are not of {SCAN[0]} with states of {SCAN[1]}"
    elif {recurrent.key_dim, recurrent.value_dim} != {HEAD_DIM}:
        return f"recurrent layers whose heads are not of size {HEAD_DIM}"
    if recurrent.width != WIDTH:
        return f"recurrent layers whose convolution is not of width {WIDTH}"
    return ""
