"""Rotary positions of images, which differ by axis.

Attention takes one position a row. That of an image's row is a row of the rotary table behind those
of all positions, which is written before the step with the angles of its three positions: so text,
decodes, the kernels and captured graphs know nothing of axes.
"""

from __future__ import annotations

import torch


class Axes:
    def __init__(self, table: torch.Tensor, axes: tuple[int, ...], positions: int) -> None:
        """`table` as attention reads it (Attention.rope_table), of so many positions and the rows
        of images in a step; `axes` as positions.Rope has them."""
        self.table = table.view(len(table), 2, len(axes))  # cosines and sines, in both layouts
        self.positions = positions
        self.of_pairs = torch.tensor(axes, device=table.device)
        self.pairs = torch.arange(len(axes), device=table.device)

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions by time, row and column, [3, rows] -> the one of each row, until the next call.
        int64 [rows]"""
        rows = positions.shape[1]
        of_each = positions.t()[:, self.of_pairs]  # [rows, pairs]
        turned = self.table[of_each, :, self.pairs]  # [rows, pairs, 2]
        end = self.positions + rows
        self.table[self.positions : end] = turned.transpose(1, 2)
        return torch.arange(self.positions, end, device=positions.device)
