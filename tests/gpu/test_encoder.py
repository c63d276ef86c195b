"""Attention of encoders on a GPU, in bfloat16, against the reference in float32."""

from __future__ import annotations

import pytest
import torch

from kvline_server.kernels.gpu_encoder import GpuEncoder
from kvline_server.kernels.torch_encoder import TorchEncoder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("lengths", [[1], [4096], [64] * 30 + [16, 24, 64], [1, 300, 7]])
def test_rows_attend_to_all_rows_of_their_sequence(dim: int, lengths: list[int]) -> None:
    """Of queries, keys and values that lie beside each other, as a GEMM makes them."""
    torch.manual_seed(dim)
    made = torch.randn(sum(lengths), 3, 4, dim, device="cuda").to(torch.bfloat16)
    encoder, reference = GpuEncoder(made.device), TorchEncoder()
    (q, k, v), (q32, k32, v32) = (each.unbind(1) for each in (made, made.cpu().float()))
    found = encoder.attend(q, k, v, encoder.plan(lengths))
    want = reference.attend(q32, k32, v32, reference.plan(lengths))
    assert found.is_contiguous()
    torch.testing.assert_close(found.cpu().float(), want, atol=2e-2, rtol=0)
