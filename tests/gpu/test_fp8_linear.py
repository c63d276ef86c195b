"""Linears with fp8 weights: torch's scaled GEMMs and our kernels against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pairs import PAGES, engine, hidden, sequence, sides, worker
from torch.nn.functional import rms_norm, silu

from kvline_server.engine.work import Kind, Work
from kvline_server.kernels import fp8, fp8_linear
from kvline_server.kernels.fp8 import BLOCK, FP8, Fp8Weight, Weight
from kvline_server.kernels.fp8_linear import SCALED, TILED
from kvline_server.kernels.projection import Norm, Operand
from kvline_server.kernels.tuning import parse, texts
from kvline_server.model.config import ModelConfig
from kvline_server.model.quantization import Quantization

pytestmark = pytest.mark.gpu
KINDS = pytest.mark.parametrize("blocks", [False, True], ids=["channel", "block"])
FORMATS = {False: Quantization("_scale", None), True: Quantization("_scale_inv", (128, 128))}
ROWS = (1, 2, 3, 5, 16, 17, 31, 64, 100, 256, 1001, 8192)
# Blocks along the inputs: 1, 5, 6 and 7 of them, and whole fours.
WHOLE = [(128, 128), (384, 640), (256, 768), (1152, 896), (6144, 4096), (512, 14336)]
SHORT = [(320, 448), (176, 1344)]  # the last blocks


def weight(outputs: int, inputs: int, blocks: bool) -> Fp8Weight:
    """With scales that differ by the factor of 9."""
    values = (100 * torch.randn(outputs, inputs, device="cuda")).clamp_(-448, 448).to(FP8)
    shape = (-(-outputs // BLOCK), -(-inputs // BLOCK)) if blocks else (outputs, 1)
    scales = 1e-3 * (1 + 8 * torch.rand(shape, device="cuda"))
    return fp8_linear.pack(Fp8Weight(values, scales, blocks))


def inputs_of(rows: int, inputs: int) -> torch.Tensor:
    """Rows and blocks of columns of different sizes."""
    x = torch.randn(rows, inputs, device="cuda") * (0.1 + torch.rand(rows, 1, device="cuda"))
    sizes = 0.1 + torch.rand(1, -(-inputs // BLOCK), device="cuda")
    return (x * sizes.repeat_interleave(BLOCK, 1)[:, :inputs]).bfloat16()


def exact(x: torch.Tensor, made: Fp8Weight) -> torch.Tensor:
    """Of inputs as they are quantised. float64 [rows, out]"""
    values, scales = fp8.quantised(x, made.blocks)
    wide = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if made.blocks else scales
    return (values.double() * wide.double()) @ made.dequantised().double().t()


def furthest(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative distance of 128 outputs of 128 rows: a stride that is wrong for some of
    them hides in the mean."""
    distances = []
    for row in range(0, len(want), BLOCK):
        for column in range(0, want.shape[1], BLOCK):
            at = slice(row, row + BLOCK), slice(column, column + BLOCK)
            distances.append(float((got[at].double() - want[at]).norm() / want[at].norm()))
    return max(distances)


@KINDS
@pytest.mark.parametrize("shape", [*WHOLE, *SHORT])
def test_every_candidate_gives_what_float64_gives(shape: tuple[int, int], blocks: bool) -> None:
    torch.manual_seed(0)
    made = weight(*shape, blocks)
    for rows in ROWS:
        x = inputs_of(rows, shape[1])
        want, out = exact(x, made), x.new_empty((rows, shape[0]))
        candidates = fp8_linear.candidates(rows, made)
        assert (SCALED in candidates) == (not blocks or shape in WHOLE)
        for choice in candidates:
            fp8_linear.run(x, made, out.fill_(float("nan")), choice)
            distance = furthest(out, want)
            assert distance < 1e-2, (rows, choice, distance)


@KINDS
def test_inputs_are_quantised_as_the_reference_does(blocks: bool) -> None:
    torch.manual_seed(0)
    for rows, inputs in ((1, 128), (3, 1344), (70, 14336), (2, 40960)):
        x = inputs_of(rows, inputs)
        x[-1, :BLOCK] = 0.0
        values, scales = fp8_linear.quantised(x, blocks)
        want, of = fp8.quantised(x, blocks)
        torch.testing.assert_close(scales[:, :rows].t() if blocks else scales, of)
        # A quotient that is off by its last bit may round to the other neighbour.
        assert (values[:rows].view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.999
        gate, up = (inputs_of(rows, inputs) for _ in range(2))
        both = torch.cat((gate, up), dim=1)
        values, scales = fp8_linear.quantised(both, blocks, gated=True)
        gated = silu(gate.float()).mul_(up.float()).bfloat16()
        want, of = fp8.quantised(gated, blocks)
        # A number that is off by its last bit of bfloat16 may be the largest.
        own = scales[:, :rows].t() if blocks else scales
        torch.testing.assert_close(own, of, rtol=8e-3, atol=0.0)
        assert furthest(values[:rows].float(), want.double()) < 3e-2
    x[0, 5], x[1, 9] = float("nan"), float("inf")
    values, _ = fp8_linear.quantised(x, blocks)
    assert values[:2].float().isnan().any(dim=1).all(), "a number that is not finite was lost"


@KINDS
@pytest.mark.parametrize("shape", [(512, 768), (768, 14336), (256, 1344)])
def test_one_row_s_linears_are_those_of_unquantised_inputs(
    shape: tuple[int, int], blocks: bool
) -> None:
    torch.manual_seed(0)
    outputs, inputs = shape
    made, x = weight(2 * outputs, inputs, blocks), inputs_of(1, inputs)
    norm, eps = torch.rand(inputs, device="cuda").bfloat16() + 0.5, 1e-5
    whole = made.dequantised().t()
    before, plain = Operand(x, Norm(norm, eps)), Operand(x)
    normed = rms_norm(x.float(), (inputs,), norm.float(), eps)
    gate, up = (normed @ whole).chunk(2, dim=1)
    residual = torch.randn(1, 2 * outputs, device="cuda").bfloat16()
    cases = [(fp8_linear.one_row(before, made, gated=True), silu(gate) * up)]
    for bias in (None, torch.randn(2 * outputs, device="cuda").bfloat16()):
        shift = 0.0 if bias is None else bias.float()
        cases.append((fp8_linear.one_row(before, made, bias), normed @ whole + shift))
        cases.append((fp8_linear.one_row(plain, made, bias), x.float() @ whole + shift))
        added = fp8_linear.one_row(plain, made, bias, residual.clone(), added=True)
        cases.append((added, residual.float() + x.float() @ whole + shift))
    for got, want in cases:
        assert furthest(got, want.double()) < 1e-2


@KINDS
def test_every_candidate_is_captured_and_replayed(blocks: bool) -> None:
    torch.manual_seed(0)
    made = weight(512, 768, blocks)
    for rows in (2, 19, 64, 300):
        x = inputs_of(rows, 768)
        for choice in fp8_linear.candidates(rows, made):
            out = x.new_empty((rows, 512))
            fp8_linear.run(x, made, out, choice)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fp8_linear.run(x, made, out, choice)
            x.copy_(inputs_of(rows, 768))
            graph.replay()
            assert furthest(out, exact(x, made)) < 1e-2, (rows, choice)


def test_choices_of_one_shape_in_fp8_and_bfloat16_are_kept_apart() -> None:
    """A model may have some of its layers in fp8 alone."""
    from kvline_server.kernels.formats import Formats

    torch.manual_seed(0)
    formats = Formats(torch.device("cuda", 0))
    made, plain = weight(512, 768, False), torch.randn(512, 768, device="cuda").bfloat16()
    x = inputs_of(64, 768)

    def of(weight: Weight) -> torch.Tensor:
        return formats.of(weight).rows(Operand(x), weight, None, None)

    formats.choices[64, 512, 768] = TILED - 5
    assert furthest(of(plain), x.double() @ plain.double().t()) < 1e-2
    assert furthest(of(made), exact(x, made)) < 1e-2
    formats.choices[64, 512, 768] = 0
    formats.fp8.tuned()
    assert furthest(of(made), exact(x, made)) < 1e-2


@pytest.fixture(params=[False, True], ids=["channel", "block"])
def config(request: Any, shape: Callable[..., ModelConfig]) -> Iterator[ModelConfig]:
    yield shape(quantization=FORMATS[request.param], qkv_bias=True)


def test_a_model_in_fp8_gives_nearly_its_dequantised_logits(config: ModelConfig) -> None:
    """A step of many rows, whose inputs are quantised, and one of one row, whose are not."""
    both = sides(config)
    weights = both[1][0].gemm_weights()
    assert len(weights) == 4 and all(isinstance(w, Fp8Weight) for kind in weights for w in kind)
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, PAGES)).tolist()
    a, b = (sequence(rng, n, free) for n in (37, 500))
    for work, most in (
        ([Work(a, 0, 36, Kind.PROMPT), Work(b, 0, 300, Kind.PROMPT)], 0.1),
        ([Work(a, 36, 1, Kind.DECODE)], 0.1),  # its cache is of quantised inputs
    ):
        want, got = (hidden(side, work) for side in both)
        distance = float((got - want).norm() / want.norm())
        assert distance < most, distance


def test_trials_choose_for_each_shape_and_choices_are_taken_over(config: ModelConfig) -> None:
    runner = worker(engine(config, step=1024))
    done = runner.tune(1024, None)
    assert done is not None
    shapes = {tuple(kind[0].shape) for kind in runner.decoder.gemm_weights()}
    assert {shape[1:] for shape in done} == shapes
    assert set(done.values()) <= {SCALED, *range(-64, -15)}
    another = worker(engine(config, step=1024))
    assert another.tune(1024, parse(texts(done))) == done
