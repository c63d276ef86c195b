"""Which devices a model is served on. Imports no torch: the launch is checked with it."""

from __future__ import annotations

from kvline_contract.launch import Device
from kvline_server.errors import ModelUnsupported
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import Mamba2

HEAD_DIM, WIDTH = 128, 4  # of the delta rule and its convolution, in the kernels


def check(config: ModelConfig, device: Device) -> None:
    """Raises ModelUnsupported, before any weights are read."""
    if device is not Device.CPU and (what := _on_cpus_alone(config)):
        raise ModelUnsupported(
            f"{config.architecture} has {what}, which are served on CPUs only at present: leave "
            "out spec.resources.gpus"
        )


def _on_cpus_alone(config: ModelConfig) -> str:
    """What no kernels of GPUs were shown to do; empty where there is nothing."""
    recurrent, experts = config.recurrent, config.experts
    if isinstance(recurrent, Mamba2):
        return "Mamba2 layers"
    if not config.rotates:
        return "attention without positions"
    if config.activation == "relu2":
        return "MLPs without a gate"
    if experts is not None and experts.scores != "softmax":
        return f"experts that a {experts.scores} chooses"
    if recurrent is not None and {recurrent.key_dim, recurrent.value_dim} != {HEAD_DIM}:
        return f"recurrent layers whose heads are not of size {HEAD_DIM}"
    if recurrent is not None and recurrent.width != WIDTH:
        return f"recurrent layers whose convolution is not of width {WIDTH}"
    return ""
