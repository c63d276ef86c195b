"""Linears with fp8 weights: the reference, our kernels against it in Triton's interpreter, and what
is asked of torch's scaled GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import SHARED, compiled, run
from torch._subclasses.fake_tensor import FakeTensorMode

from kvline_server.kernels import fp8, fp8_linear
from kvline_server.kernels.fp8 import FP8, Fp8Weight
from kvline_server.kernels.fp8_linear import SCALED, TILED, TILES, Fp8Linears
from kvline_server.kernels.tuning import Choices

KINDS = pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])


def weight(outputs: int, inputs: int, blocks: bool) -> Fp8Weight:
    """With scales that differ by the factor of 9."""
    values = (100 * torch.randn(outputs, inputs)).clamp(-448, 448).to(FP8)
    shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
    return Fp8Weight(values, 1e-3 * (1 + 8 * torch.rand(shape)), blocks)


@KINDS
def test_the_reference_is_the_exact_one_but_for_the_rounding_of_inputs(blocks: bool) -> None:
    """Each number is off by at most 1/16 of itself, or by 2^-10 of the scale where it is small."""
    torch.manual_seed(0)
    made, x = weight(176, 320, blocks), torch.randn(9, 320) * torch.rand(9, 1)
    x[3] = 0.0
    exact = x.double() @ made.dequantised().double().t()
    values, scales = fp8.quantised(x, blocks)
    assert scales.shape == ((9, 3) if blocks else (9, 1)) and values.float().isfinite().all()
    wide = (scales.repeat_interleave(128, 1) if blocks else scales)[:, :320]
    off = (values.float() * wide - x).abs()
    assert (off <= torch.maximum(x.abs() / 16, wide * 2.0**-10) + 1e-12).all()
    got = fp8.linear(x, made).double()
    assert (got[3] == 0).all()
    assert (got - exact).norm() < 0.04 * exact.norm()
    dequantised = (values.double() * wide) @ made.dequantised().double().t()
    torch.testing.assert_close(got, dequantised, rtol=1e-4, atol=1e-3)


@KINDS
def test_the_last_rows_of_a_weight_begin_with_a_block(blocks: bool) -> None:
    torch.manual_seed(0)
    made = weight(560, 200, blocks)
    for rows, count in ((256, 304), (48, 48), (1000, 560)):
        last = made.last(rows)
        assert len(last) == count
        assert torch.equal(last.dequantised(), made.dequantised()[-count:])


SCRIPT = """
import torch
from interpreted import launcher
from torch.nn.functional import rms_norm, silu
from kvline_server.kernels import fp8, fp8_linear, triton_fp8
from kvline_server.kernels.fp8 import FP8, Fp8Weight
from kvline_server.kernels.projection import Norm, Operand

fp8_linear.launch = launcher(triton_fp8)

def weight(outputs, inputs, blocks):
    values = (100 * torch.randn(outputs, inputs)).clamp(-448, 448).to(FP8)
    shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
    return fp8_linear.pack(Fp8Weight(values, 1e-3 * (1 + 8 * torch.rand(shape)), blocks))

def near(got, want, most):
    distance = float((got.float() - want.float()).norm() / want.float().norm())
    assert distance < most, distance

def exact(x, blocks, gated):
    values, scales = fp8.quantised(x, blocks)
    return values, scales.t().contiguous() if blocks else scales

torch.manual_seed(0)
for blocks in (False, True):
    for rows, inputs in ((1, 128), (5, 1344), (18, 2080)):
        x = torch.randn(rows, inputs)
        x[-1] *= 1e3
        values, scales = fp8_linear.quantised(x, blocks)
        want, of = fp8.quantised(x, blocks)
        torch.testing.assert_close(scales[:, :rows].t() if blocks else scales, of)
        # Some of those that round up to a power of two the interpreter halves, and a GPU does not.
        assert (values[:rows].float() == want.float()).float().mean() > 0.96
        both = torch.randn(rows, 2 * inputs)
        gate, up = both.chunk(2, dim=1)
        values, scales = fp8_linear.quantised(both, blocks, gated=True)
        want, of = fp8.quantised(silu(gate) * up, blocks)
        torch.testing.assert_close(scales[:, :rows].t() if blocks else scales, of)
        assert (values[:rows].float() == want.float()).float().mean() > 0.96
    kernel, fp8_linear.quantised = fp8_linear.quantised, exact
    for outputs, inputs, rows in ((176, 464, 19), (272, 640, 3)):
        made, x = weight(outputs, inputs, blocks), torch.randn(rows, inputs)
        want = fp8.linear(x, made)
        for index, tile in enumerate(fp8_linear.TILES):
            out = torch.full((rows, outputs), float("nan"))
            fp8_linear.run(x, made, out, fp8_linear.TILED - index)
            near(out, want, 1e-5)
    fp8_linear.quantised = kernel
    for outputs, inputs in ((256, 1344), (384, 128)):
        made, x = weight(2 * outputs, inputs, blocks), torch.randn(1, inputs)
        norm, eps = torch.rand(inputs) + 0.5, 1e-5
        before, plain = Operand(x, Norm(norm, eps)), Operand(x)
        normed = rms_norm(x, (inputs,), norm, eps)
        whole = made.dequantised().t()
        gate, up = (normed @ whole).chunk(2, dim=1)
        near(fp8_linear.one_row(before, made, gated=True), silu(gate) * up, 1e-5)
        residual = torch.randn(1, 2 * outputs)
        for bias in (None, torch.randn(2 * outputs)):
            shift = 0 if bias is None else bias
            near(fp8_linear.one_row(before, made, bias), normed @ whole + shift, 1e-5)
            near(fp8_linear.one_row(plain, made, bias), x @ whole + shift, 1e-5)
            got = fp8_linear.one_row(plain, made, bias, residual.clone(), added=True)
            near(got, residual + x @ whole + shift, 1e-5)
"""


@pytest.mark.kernels
def test_the_gpu_s_kernels_are_the_reference_s() -> None:
    """In Triton's interpreter, with what is promised of alignment checked."""
    run(SCRIPT)


@pytest.mark.kernels
def test_every_variant_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, made in compiled(fp8_linear.variants(torch.bfloat16), monkeypatch):
        assert made.shared <= SHARED, name


def checking(scaled: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """A GEMM into `out`, as its functional form has it: only that can be asked without a GPU."""

    def into(*words: Any, out: torch.Tensor, **options: Any) -> None:
        made = scaled(*words, **options)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)

    return into


@KINDS
@pytest.mark.parametrize("shape", [(256, 768), (4096, 14336), (128, 128), (384, 640)])
def test_torch_takes_shapes_and_strides_of_what_it_is_given(
    blocks: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks along the inputs are not whole fours."""
    monkeypatch.setattr(fp8_linear, "launch", lambda *words: None)
    for name in ("_scaled_mm", "_scaled_mm_v2"):
        monkeypatch.setattr(torch, name, checking(getattr(torch, name)))
    with FakeTensorMode():
        values = torch.empty(shape, dtype=FP8, device="cuda")
        scales = torch.empty(
            (shape[0] // 128, shape[1] // 128) if blocks else (shape[0], 1), device="cuda"
        )
        made = fp8_linear.pack(Fp8Weight(values, scales, blocks))
        for rows in (0, 1, 3, 4, 64, 517):
            x = torch.empty(rows, shape[1], dtype=torch.bfloat16, device="cuda")
            fp8_linear.run(x, made, x.new_empty(rows, shape[0]), SCALED)


def test_row_counts_without_a_trial_have_the_choice_of_the_next_with_one() -> None:
    made = weight(512, 256, True)
    choices: Choices = {
        (8, 512, 256): TILED - 1,
        (64, 512, 256): TILED - 5,
        (1024, 512, 256): SCALED,
        (1024, 512, 512): TILED - 8,
    }
    linears = Fp8Linears(choices)
    found = [linears.choice(rows, made) for rows in (1, 8, 9, 64, 65, 4096)]
    assert found == [TILED - 1, TILED - 1, TILED - 5, TILED - 5, SCALED, SCALED]
    choices[4096, 512, 256] = TILED - 9
    linears.tuned()
    assert linears.choice(4000, made) == TILED - 9
    assert linears.choice(1024, made) == SCALED


def test_without_trials_and_with_those_of_other_weights_a_tile_is_taken() -> None:
    made, choices = weight(512, 256, False), {(16, 512, 256): 3, (32, 512, 256): -2}
    for rows in (1, 16, 17, 32, 300):
        choice = Fp8Linears(choices).choice(rows, made)
        assert TILES[TILED - choice].rows >= min(rows, 64)


def test_torch_s_gemm_of_blocks_is_no_candidate_for_short_ones() -> None:
    for shape, there in (((512, 256), True), ((512, 192), False), ((320, 256), False)):
        assert (SCALED in fp8_linear.candidates(64, weight(*shape, True))) == there
        assert SCALED in fp8_linear.candidates(64, weight(*shape, False))


@KINDS
def test_a_candidate_that_is_wrong_or_fails_is_not_timed(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made, x = weight(512, 256, blocks), torch.randn(20, 256)
    want = fp8.linear(x, made)

    def run(x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, choice: int) -> None:
        if choice == 3:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        if choice != 4:
            out.copy_(want)
        if choice == 5:
            out[-1, -128:] *= 3

    monkeypatch.setattr(fp8_linear, "run", run)
    out = torch.empty(20, 512)
    assert fp8_linear.right(x, made, out, [3, 4, 5, 6, 7]) == [6, 7]
    with pytest.raises(RuntimeError, match=r"no kernel for fp8 weights \[512, 256\]"):
        fp8_linear.right(x, made, out, [3, 4, 5])
