"""Our Triton kernels of encoders, without a GPU, against torch's."""

from __future__ import annotations

import pytest
from interpreted import SHARED, compiled, run

from kvline_server.kernels import cuda_encoder

BEGIN = """
import torch
from interpreted import launcher
from kvline_server.kernels import cuda_encoder, triton_encoder
from kvline_server.kernels.encoder import Angles, Norm
from kvline_server.kernels.torch_encoder import TorchEncoder

cuda_encoder.launch = launcher(triton_encoder)
torch.manual_seed(0)
"""


@pytest.mark.kernels
def test_heads_are_rotated_as_by_torch_and_padded_with_zeros() -> None:
    """float32 numbers in the place of bfloat16's, so that the two differ by rounding alone. Heads
    that are padded and such that are not, more of them than a program has."""
    run(
        BEGIN
        + """
def check(rows, heads, dim, turned):
    qkv = torch.randn(rows, 3 * heads * dim)
    angles = Angles(*torch.randn(2, rows, dim // 2)) if turned else None
    want = qkv.clone().view(rows, 3, heads, dim)
    made = cuda_encoder.pad_heads(qkv, heads, angles)
    if turned:
        cos, sin = angles.cos[:, None, None], angles.sin[:, None, None]
        one, other = want[:, :2].chunk(2, dim=-1)
        turns = torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
        want = torch.cat((turns, want[:, 2:]), dim=1)
    torch.testing.assert_close(made[..., :dim], want)
    assert made.shape[-1] == (64 if dim <= 64 else 128)
    assert not made[..., dim:].any()
    back = cuda_encoder.unpad_heads(made[:, 1].contiguous(), dim)
    assert torch.equal(back, made[:, 1, :, :dim].flatten(1))

check(3, 5, 72, True)
check(2, 17, 80, True)
check(2, 3, 64, True)
check(2, 4, 72, False)
check(2, 2, 8, True)
check(2, 2, 128, False)
"""
    )


@pytest.mark.kernels
def test_a_sum_is_normed_as_by_torch_and_kept() -> None:
    """Widths that are no powers of two, aligned for vector loads and not."""
    run(
        BEGIN
        + """
for width in (1152, 1280, 36, 512):
    x, made = 3 + torch.randn(2, 3, width)
    weight, bias = torch.randn(2, width)
    for given, added in ((bias, made), (None, made), (bias, None), (None, None)):
        own, want = x.clone(), x.clone()
        found = cuda_encoder.norm(own, Norm(weight, given, 1e-6), added)
        normed = TorchEncoder().norm(want, Norm(weight, given, 1e-6), added)
        assert torch.equal(own, want)
        torch.testing.assert_close(found, normed, atol=1e-5, rtol=1e-5)
"""
    )


@pytest.mark.kernels
def test_all_variants_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, made in compiled(cuda_encoder.variants(torch.bfloat16), monkeypatch):
        assert made.shared <= SHARED, name


def test_a_plan_s_workspace_is_never_less_for_more_images() -> None:
    """fa3's heads have work tiles of their own up to 4,096 each, and then share one schedule."""
    heads, processors = 16, 132
    for dim, tile in ((72, 128), (64, 192)):
        found = []
        for sequences in (1, 2000, 4095, 4096, 4097, 9000):
            rows = 4 * sequences
            tiles = -(-rows // tile) + sequences - 1  # as FlashInfer bounds them
            apart = heads if tiles <= 4096 else 1
            found.append(cuda_encoder.workspace(rows, sequences, heads, dim, processors))
            assert found[-1] >= 28 * tiles * apart + 4 * (processors + 1)
        assert found == sorted(found)
