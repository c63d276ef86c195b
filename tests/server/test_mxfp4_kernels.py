"""Experts in MXFP4 on a GPU: our kernel against the reference in Triton's interpreter, the packing
that it reads, and the choice among its tiles."""

from __future__ import annotations

import pytest
import torch
from interpreted import SHARED, compiled, run

from kvline_server.kernels import cuda_mxfp4
from kvline_server.kernels.cuda_mxfp4 import GROUP, TILES, UNIT, Mxfp4Gemms, packed
from kvline_server.kernels.experts import Layer
from kvline_server.kernels.mxfp4 import Mxfp4Weight

GPT_OSS = 32, 4  # experts, chosen

SCRIPT = """
import torch
from interpreted import launcher
from kvline_server.kernels import cuda_experts, cuda_mxfp4, torch_experts, triton_experts
from kvline_server.kernels import triton_mxfp4
from kvline_server.kernels.cuda_mxfp4 import TILES, Mxfp4Gemms, packed
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.experts import Layer
from kvline_server.kernels.mxfp4 import Mxfp4Weight
from kvline_server.kernels.torch_rows import TorchRows

cuda_mxfp4.PTX = 0  # inline PTX, which the interpreter lacks
cuda_experts.launch = launcher(triton_experts)
cuda_mxfp4.launch = launcher(triton_mxfp4)
new_empty = torch.Tensor.new_empty

def broken(made):  # what is not written shows
    return made.fill_(float("nan") if made.is_floating_point() else -(1 << 14))

torch.Tensor.new_empty = lambda *a, **k: broken(new_empty(*a, **k))
rows_of = TorchRows()
gemms = Mxfp4Gemms({}, None)

def weight(rows, inputs):
    return Mxfp4Weight(
        torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8),
        torch.randint(121, 126, (rows, inputs // 32), dtype=torch.uint8),
    )

def check(experts, chosen, rows, hidden, width, choice, real=None, elsewhere=False):
    torch.manual_seed(rows)
    real = rows if real is None else real
    x = torch.randn(rows, hidden)
    x[real:] = float("nan")
    gate_up, down = weight(experts * 2 * width, hidden), weight(experts * hidden, width)
    biases = torch.randn(experts, 2 * width), None if elsewhere else torch.randn(experts, hidden)
    logits = torch.randn(rows, experts)
    how = Routing(chosen, True, "swiglu_oai")
    routes = torch_experts.route(logits[:real], chosen, True)
    want = torch_experts.run(
        x[:real],
        routes,
        Layer(gate_up, down, *biases),
        lambda both: rows_of.activate_and_mul(both, how.activation),
    )
    layer = Layer(packed(gate_up), packed(down), *biases)
    got = gemms.run(x, logits, layer, how, Given(real), choice=choice)
    torch.testing.assert_close(got[:real], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert (got[real:] == 0).all(), "padding"

for choice in range(len(TILES)):
    check(3, 2, 7, 64, 96, choice)
check(2, 1, 70, 160, 32, 2)  # several tiles of an expert, and no whole number of units
check(2, 1, 70, 160, 32, 0)
for rows, choice in ((40, 4), (70, 4), (70, 6), (150, 6)):  # up to 16, 32, 64 and 128 pairs in one
    check(2, 1, rows, 96, 32, choice)
check(3, 2, 9, 288, 160, 0, real=5)
check(8, 2, 2, 96, 32, 0)  # each pair is a tile
check(3, 2, 7, 64, 96, 0, elsewhere=True)  # a rank without the biases of down
"""


@pytest.mark.kernels
def test_the_kernel_does_what_the_reference_does() -> None:
    run(SCRIPT)


@pytest.mark.kernels
def test_every_variant_compiles_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    every = dict(compiled(cuda_mxfp4.variants(torch.bfloat16), monkeypatch))
    assert len(every) == 3 * len(TILES)
    assert max(cubin.shared for cubin in every.values()) <= SHARED


def test_packing_keeps_every_number_where_the_kernel_looks_for_it() -> None:
    """A unit's word j has the numbers j, j + 32, j + 64 and j + 96, as bfloat16 has their bits."""
    torch.manual_seed(0)
    rows, inputs = 2 * GROUP, UNIT + 64  # half of the last unit is padding
    values = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(0, 129, (rows, inputs // 32), dtype=torch.uint8)
    weight = Mxfp4Weight(values, scales)
    made = packed(weight)
    assert made.shape == (rows, inputs) and len(made) == rows
    assert made.values.shape == (2, 2, GROUP, 32) and made.scales.shape == (2, 2, GROUP)
    words = made.values.int().bitwise_and(0xFFFF)
    fourth = (words << 1) & 0x8000 | (words >> 3) & 0x0180 | (words >> 7) & 0x0040
    bits = torch.stack([*((words << by) & 0x81C0 for by in (0, 3, 6)), fourth], dim=-2)
    numbers = (bits << 16).view(torch.float32)  # of bfloat16's bits
    exponents = made.scales.contiguous().view(torch.uint8).view(2, 2, GROUP, 4, 1)
    found = numbers * torch.exp2(exponents.float() - 127)
    whole = found.transpose(1, 2).reshape(rows, -1)
    assert torch.equal(whole[:, :inputs], weight.dequantised())
    assert (whole[:, inputs:] == 0).all()


def test_without_a_trial_a_tile_fits_what_an_expert_has() -> None:
    gemms = Mxfp4Gemms({}, lambda x, _: x)
    experts, chosen = GPT_OSS
    layer = Layer(*(torch.empty((experts * n, 32), device="meta") for n in (64, 32)))
    counts = (1, 64, 256, 1024, 8192)
    assert [TILES[gemms.choice(rows, chosen, layer)].rows for rows in counts] == [
        32,
        32,
        64,
        128,
        128,
    ]
    for rows, least, most in zip(counts, (8, 8, 16, 32, 32), (32, 32, 64, 128, 128), strict=True):
        tried = [TILES[at].rows for at in gemms.tried(rows * chosen, experts)]
        assert (min(tried), max(tried)) == (least, most), rows
