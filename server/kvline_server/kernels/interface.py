"""A kernel backend, as the rooms above use it: named groups of operations on tensors of its device.
One object per engine; it knows the device and the dtype, and keeps nothing of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch

from kvline_server.kernels.attention import Attention
from kvline_server.kernels.encoder import Encoder
from kvline_server.kernels.experts import Experts
from kvline_server.kernels.gemms import Gemms
from kvline_server.kernels.group import Group
from kvline_server.kernels.recurrent import Recurrent
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.sampling import Sampling


class Fetch(Protocol):
    """Copies to the host under way."""

    def wait(self) -> list[np.ndarray]: ...


class Kernels(ABC):
    device: torch.device
    dtype: torch.dtype  # of weights and hidden states
    depth: int  # steps in flight while the host prepares the next one: 1 on a GPU, 0 on the CPU
    build: str = ""  # that the numbers of tuning.Choices are of; empty where nothing is chosen

    group: Group  # the ranks that have the other parts of the model
    attention: Attention
    recurrent: Recurrent
    rows: Rows
    gemms: Gemms
    experts: Experts
    sampling: Sampling
    encoder: Encoder

    @abstractmethod
    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copies the arrays to the device, as one transfer on a GPU."""

    @abstractmethod
    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        """Starts copies to the host, behind all work enqueued before."""
