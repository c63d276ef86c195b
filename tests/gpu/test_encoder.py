"""Encoders on a GPU, in bfloat16, against the reference in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import vision_models
from torch.nn import functional

from kvline_server.kernels.encoder import Angles, Encoder, Norm
from kvline_server.kernels.group import ALONE
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_encoder import TorchEncoder
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import SafetensorsSource

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    yield FlashInferKernels(4, 2, 128)


@pytest.fixture(scope="module")
def encoder(kernels: Kernels) -> Encoder:
    return kernels.encoder


@pytest.mark.parametrize("dim", [16, 64, 72, 80, 128])
@pytest.mark.parametrize(
    "lengths", [[1], [4096], [64] * 30 + [16, 24, 64], [1, 300, 7], [4] * 4200]
)
@pytest.mark.parametrize("turned", [False, True])
def test_rows_attend_to_all_rows_of_their_sequence(
    encoder: Encoder, dim: int, lengths: list[int], turned: bool
) -> None:
    """Of few rows and many, and of so many sequences that all heads have one schedule."""
    torch.manual_seed(dim)
    rows, heads, reference = sum(lengths), 4, TorchEncoder()
    qkv = torch.randn(rows, 3 * heads * dim, device="cuda").to(torch.bfloat16)
    turns = torch.randn(rows, dim // 2)
    angles = torch.stack((turns.cos(), turns.sin())) if turned else None
    want = reference.attend(
        qkv.cpu().float(),
        reference.plan(lengths, heads, dim),
        None if angles is None else Angles(*angles),
    )
    given = None if angles is None else Angles(*angles.cuda())
    found = encoder.attend(qkv, encoder.plan(lengths, heads, dim), given)
    assert found.is_contiguous() and found.shape == (rows, heads * dim)
    torch.testing.assert_close(found.cpu().float(), want, atol=4e-2, rtol=2e-2)


def test_a_plan_is_that_of_its_own_lengths_while_others_are_made(encoder: Encoder) -> None:
    """Of more plans than there are buffers of the host, from which they are copied."""
    torch.manual_seed(3)
    every = [[n] * (6000 // n) for n in (1500, 20, 3000, 6000, 10, 750)]
    qkv = torch.randn(6000, 3 * 4 * 72, device="cuda").to(torch.bfloat16)
    plans = [encoder.plan(lengths, 4, 72) for lengths in every]
    found = [encoder.attend(qkv, plan, None) for plan in plans]
    for lengths, made in zip(every, found, strict=True):
        torch.cuda.synchronize()
        alone = encoder.attend(qkv, encoder.plan(lengths, 4, 72), None)
        assert torch.equal(made, alone)


@pytest.mark.parametrize("width", [32, 1152, 1280, 4098])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_rows_are_normed(encoder: Encoder, width: int, centred: bool, added: bool) -> None:
    torch.manual_seed(width)
    x, made = (2 + torch.randn(2, 300, width, device="cuda")).to(torch.bfloat16)
    weight, bias = torch.randn(2, width, device="cuda").to(torch.bfloat16)
    given, total = bias if centred else None, (x + made if added else x.clone())
    rounded = None if given is None else given.float()
    want = TorchEncoder().norm(total.float(), Norm(weight.float(), rounded, 1e-6))
    found = encoder.norm(x, Norm(weight, given, 1e-6), made if added else None)
    assert torch.equal(x, total)
    torch.testing.assert_close(found.float(), want, atol=2e-2, rtol=1e-2)


def test_gelu_within_a_gemm_is_the_tanh_approximation(encoder: Encoder) -> None:
    """Which is by a tenth off the exact one where both are small."""
    x = torch.linspace(-4, 4, 512, device="cuda").to(torch.bfloat16)
    rows = x.expand(64, 512).contiguous()
    eye, bias = torch.eye(512, device="cuda").to(torch.bfloat16), torch.zeros_like(x)
    found = encoder.linear_gelu(rows, eye, bias).float()
    near = functional.gelu(x.float(), approximate="tanh").expand(64, 512)
    torch.testing.assert_close(found, near, atol=1e-5, rtol=2e-2)
    assert not torch.allclose(found, functional.gelu(x.float()).expand(64, 512), 2e-2, 1e-5)


def test_a_tower_whose_kernels_are_missing_runs_torch_s(
    monkeypatch: pytest.MonkeyPatch, shape: Callable[..., ModelConfig]
) -> None:
    """The text model's are there, so that nothing else would say so before the first pass."""
    from kvline_server.kernels import gpu_encoder
    from kvline_server.worker import backend

    def lacking(*_words: object) -> None:
        raise FileNotFoundError(2, "no such module")

    monkeypatch.setattr(gpu_encoder, "get_batch_prefill_module", lacking)
    vision, warnings = vision_models.saved("qwen3_vl_wide").config, list[str]()
    given = torch.bfloat16, shape(), ALONE, (0,)
    assert not isinstance(backend._cuda_kernels(warnings.append, *given, None), TorchKernels)
    assert warnings == []
    found = backend._cuda_kernels(warnings.append, *given, vision)
    assert isinstance(found, TorchKernels) and found.device.type == "cuda"
    assert not found.encoder.keeps_memory, "sizing leaves its passes' memory free"
    assert "using torch's slower ones" in warnings[0]


@pytest.mark.parametrize("family", ["qwen3_vl_wide", "qwen2_5_vl_wide", "qwen3_5_wide", "gemma3"])
def test_a_tower_s_rows_are_as_near_float32_as_those_of_a_cpu_in_bfloat16(
    kernels: Kernels, family: str
) -> None:
    sizes = [(32, 32)] * 3 if family == "gemma3" else [(40, 24), (16, 88), (8, 8), (160, 320)]
    pictures = [vision_models.picture(*size, at) for at, size in enumerate(sizes)]
    own = vision_models.saved(family)
    want = vision_models.rows(vision_models.loaded(family), pictures)
    off = []
    for each in (kernels, TorchKernels(torch.bfloat16)):
        tower = vision_models.load(SafetensorsSource(own.folder), own.config, each)
        made = vision_models.rows(tower, pictures, 1, each)
        off.append(float((made.cpu().float() - want).abs().mean() / want.abs().mean()))
    print(family, *off)
    gpu, cpu = off
    assert gpu < 1.3 * cpu + 1e-3 and gpu < 0.1
