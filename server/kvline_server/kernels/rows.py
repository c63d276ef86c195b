"""Operations on rows of hidden states, each by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvline_server.kernels.projection import Norm


class Rows(ABC):
    @abstractmethod
    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Over the last dimension."""

    @abstractmethod
    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """RMS norm of x + residual, which becomes that sum. May overwrite x too."""

    @abstractmethod
    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """silu or gelu_tanh of the first half times the second, or swiglu_oai of both, as
        Routing.activation has it. [rows, 2 * d] -> [rows, d]. Or relu2, the square of what is
        positive: of all, [rows, d] -> [rows, d]"""
