"""The attention of encoders against float64, and its memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvline_server.kernels.torch_encoder import TorchEncoder


def _of(rows: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    """Queries, keys and values beside each other, as a GEMM makes them. [rows, 3 * heads * dim]"""
    torch.manual_seed(rows)
    return torch.randn(rows, 3 * heads * dim)


@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [3, 9, 9, 1, 4], [1, 1]])
def test_rows_attend_to_all_rows_of_their_sequence_alone(lengths: list[int]) -> None:
    qkv = _of(sum(lengths))
    q, k, v = qkv.view(-1, 3, 2, 8).unbind(1)
    encoder = TorchEncoder()
    made = encoder.attend(qkv, encoder.plan(lengths, 2, 8), None)
    whose = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 8**0.5
    scores.masked_fill_(whose.unsqueeze(1) != whose, -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    assert made.is_contiguous()
    torch.testing.assert_close(made.double(), want.flatten(1), atol=1e-5, rtol=0)


def _peak() -> int:
    """Of this process, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("dim", [8, 72, 80])
def test_attention_on_a_cpu_keeps_no_scores(dim: int) -> None:
    """Those of 8,192 rows are 512 MiB."""
    rows = 8192
    qkv = _of(rows, 2, dim)
    encoder = TorchEncoder()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = _peak()
    encoder.attend(qkv, encoder.plan([rows], 2, dim), None)
    assert _peak() - before < (64 << 20)
