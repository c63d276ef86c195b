"""Which devices a model is served on. Imports no torch: the launch is checked with it."""

from __future__ import annotations

from kvline_contract.launch import Device
from kvline_server.errors import ModelUnsupported
from kvline_server.model.config import ModelConfig


def check(config: ModelConfig, device: Device) -> None:
    """Raises ModelUnsupported, before any weights are read."""
    if config.recurrent is not None and device is not Device.CPU:
        raise ModelUnsupported(
            f"{config.architecture} has recurrent layers, which are served on CPUs only at "
            "present: leave out spec.resources.gpus"
        )
