"""The GPU's kernels against plain torch in float32 on the CPU: same steps, same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import GEMMA, PAGES, hidden, sequence, sides

from kvline_server.engine.work import Kind, Work
from kvline_server.kernels.best import token_of
from kvline_server.kernels.group import Alone
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import NO_TOKEN, SamplingMetadata
from kvline_server.kernels.projection import Gate, Join, Norm, Operand, Projection
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.config import ModelConfig
from kvline_server.model.shard import Shard, tokens
from kvline_server.worker.step import MASK_BITS, Table, TokenMasks, mask_words
from kvline_server.worker.vocabulary import Vocabulary

pytestmark = pytest.mark.gpu
HEADS = (8, 2, 128)  # queries, keys and values, size: the kernels of rows do not depend on it


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, 2e-2),
        ({"head_dim": 64}, 2e-2),
        ({"qk_norm": True}, 2e-2),
        ({"windows": (0, 30, 300)}, 2e-2),
        ({"qk_norm": True} | GEMMA, 4e-2),
    ],
    ids=["llama", "head64", "qk-norm", "windows", "gemma"],
)
def test_a_mixed_step_gives_the_reference_s_logits(
    shape: Callable[..., ModelConfig], more: dict[str, Any], most: float
) -> None:
    """Prompts whole and in chunks, then decodes beside a prompt, over scattered pages. In bfloat16
    plain torch is off by 0.9e-2, of a Gemma with its norms after each block by 2.3e-2."""
    both = sides(shape(**more))
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, PAGES)).tolist()
    groups = len(both[0][0].windows)
    a, b, c = (sequence(rng, n, free, groups) for n in (37, 500, 1000))
    steps = [
        [Work(a, 0, 36, Kind.PROMPT), Work(b, 0, 300, Kind.PROMPT)],
        [Work(a, 36, 1, Kind.DECODE), Work(b, 300, 199, Kind.PROMPT), Work(c, 0, 512, Kind.PROMPT)],
        [Work(a, 36, 1, Kind.DECODE), Work(b, 499, 1, Kind.DECODE), Work(c, 512, 488, Kind.PROMPT)],
        [Work(s, len(s.tokens) - 1, 1, Kind.DECODE) for s in (a, b, c)],
    ]
    for work in steps:
        want, got = (hidden(side, work) for side in both)
        distance = float((got - want).norm() / want.norm())
        assert distance < most, distance


def linears(kernels: Kernels, x: torch.Tensor, shift: bool) -> list[torch.Tensor]:
    """What two blocks do between them: a linear, the sum, a norm, the next linear. Weights are
    those of the seed."""
    outputs, inputs = 1056, x.shape[1]
    torch.manual_seed(0)

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(kernels.device, kernels.dtype)

    residual, norm, bias = torch.randn(len(x), outputs), torch.rand(outputs), torch.randn(outputs)
    last = torch.randn(outputs, inputs) / inputs**0.5
    first = to(torch.randn(2 * outputs, outputs) / outputs**0.5)
    added, total = to(bias) if shift else None, to(residual)
    then = Join(total, None, Norm(to(norm + 0.5), 1e-5))
    made = kernels.gemms.project(Operand(to(x)), Projection(to(last), added), then)
    assert (made.norm is not None) == (kernels.device.type == "cuda" and len(x) == 1)
    plain = kernels.gemms.project(made, Projection(first[:outputs].contiguous(), added))
    gated = kernels.gemms.project(made, Projection(first), Gate("silu"))
    assert plain.settled and gated.settled
    return [total, plain.rows, gated.rows]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_linears_between_blocks_are_the_reference_s(rows: int, shift: bool) -> None:
    """With the norm before them, the activation or the sum after them; one row's are one kernel."""
    from kvline_server.kernels.flashinfer import FlashInferKernels

    x = torch.randn(rows, 1344)
    want, got = (linears(k, x, shift) for k in (TorchKernels(), FlashInferKernels(*HEADS)))
    for one, other in zip(want, got, strict=True):
        distance = float((other.float().cpu() - one).norm() / one.norm())
        assert distance < 2e-2, distance


@pytest.mark.parametrize("shift", [False, True])
def test_one_row_s_term_of_a_sum_over_ranks_is_the_reference_s(shift: bool) -> None:
    """Two ranks that have the same columns: the sum is twice the term, then the residual."""
    from kvline_server.kernels.flashinfer import FlashInferKernels

    class Twice(Alone):
        ranks = 2

        def buffer(self, rows: int, width: int) -> torch.Tensor | None:
            return torch.empty((rows, width), dtype=torch.bfloat16, device="cuda")

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

        def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
            residual.add_(self.all_reduce(x))

    torch.manual_seed(0)
    x, residual, norm = torch.randn(1, 1344), torch.randn(1, 1056), torch.rand(1056) + 0.5
    weight, bias = torch.randn(1056, 1344) / 1344**0.5, torch.randn(1056) if shift else None
    want = residual + 2 * torch.nn.functional.linear(x, weight, bias)
    kernels = FlashInferKernels(*HEADS, Twice())
    row, matrix, into, scale = (t.cuda().bfloat16() for t in (x, weight, residual, norm))
    added = None if bias is None else bias.cuda().bfloat16()
    then = Join(into, None, Norm(scale, 1e-5))
    made = kernels.gemms.project(Operand(row), Projection(matrix, added), then)
    assert made.norm is not None and made.rows is into
    assert float((into.float().cpu() - want).norm() / want.norm()) < 2e-2


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_parts_of_scores_and_draws_are_those_of_whole_rows(ranks: int) -> None:
    """Bit for bit: a rank's kernels see the same logits and noise, of its own tokens."""
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels, rows, size = FlashInferKernels(*HEADS), 300, 128_256
    logits = torch.randn(rows, size, device="cuda").mul_(3).bfloat16()
    rng = np.random.default_rng(0)
    ones = np.ones(rows, np.float32)
    temperatures = rng.choice([0.0, 0.6, 1.0, 1.5], rows).astype(np.float32)
    keys = rng.integers(0, 2**64, rows, dtype=np.uint64)
    metadata = SamplingMetadata(temperatures, (0 * ones).astype(np.int32), ones, 0 * ones, keys)
    targets = torch.from_numpy(rng.integers(0, size, rows)).cuda()
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1).float()
    logits[3, 7], logits[4, 128_000], logits[5] = float("nan"), float("inf"), float("-inf")
    best, parts = [], []
    for rank in range(ranks):
        own = tokens(size, Shard(rank, ranks))
        mine = logits[:, own.start : own.stop].contiguous()
        best.append(kernels.sampling.best(mine, metadata, own.start))
        parts.append(kernels.sampling.shard_scores(mine, chosen, 20))
    assert (
        token_of(torch.stack(best).amax(dim=0)) == kernels.sampling.choose(logits, metadata)
    ).all()
    whole = kernels.sampling.score(logits, targets, 20)
    above = torch.stack([part.above for part in parts]).sum(dim=0)
    some = torch.arange(rows, device="cuda") > 5
    assert (above + 1 == whole.ranks)[some].all()
    normalisers = torch.stack([part.normalisers for part in parts]).logsumexp(dim=0)
    torch.testing.assert_close((chosen - normalisers)[some], whole.values[some], atol=1e-4, rtol=0)
    logits_of = torch.cat([part.top_logits for part in parts], dim=1)
    values = logits_of.sort(dim=1, descending=True).values[:, :20] - normalisers.unsqueeze(1)
    torch.testing.assert_close(values[some], whole.top_values[some], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 3])
def test_masks_are_the_reference_s(ranks: int, dtype: torch.dtype) -> None:
    """Bit for bit, on each rank's part; and no token is drawn that is not allowed."""
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels, rows, size = FlashInferKernels(*HEADS), 64, 128_259
    rng = np.random.default_rng(0)
    logits = torch.randn(rows, size).to(dtype)
    words = rng.integers(-(2**31), 2**31, (rows // 2, mask_words(size)), dtype=np.int32)
    masks = TokenMasks(np.arange(0, rows, 2), words.reshape(-1))
    for own in (tokens(size, Shard(rank, ranks)) for rank in range(ranks)):
        want = logits[:, own.start : own.stop].contiguous()
        got, first = want.cuda(), own.start % MASK_BITS
        at, bits = TorchKernels().upload(masks.rows, masks.within(own))
        TorchKernels().sampling.mask(want, at, bits, first)
        at, bits = kernels.upload(masks.rows, masks.within(own))
        kernels.sampling.mask(got, at, bits.view(len(at), -1), first)
        assert torch.equal(got.cpu(), want)
    ones = np.ones(rows, np.float32)
    keys = rng.integers(0, 2**64, rows, dtype=np.uint64)
    metadata = SamplingMetadata(ones, (0 * ones).astype(np.int32), ones, 0 * ones, keys)
    chosen = Vocabulary(kernels, size).sample(logits.cuda(), metadata, (), masks).cpu()
    drawn = chosen[::2].numpy()
    assert (words[np.arange(rows // 2), drawn // MASK_BITS] >> drawn % MASK_BITS & 1).all()


def table(kernels: Kernels, logits: torch.Tensor, targets: np.ndarray) -> Table:
    made = kernels.sampling.score(logits, kernels.upload(targets)[0], 20)
    return Table(*kernels.fetch(made.tensors()).wait())


def test_scores_are_the_reference_s(shape: Callable[..., ModelConfig]) -> None:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels = FlashInferKernels(*HEADS)
    logits = torch.randn(300, 128_256, device="cuda").mul_(3).bfloat16()
    targets = np.random.default_rng(0).integers(0, 128_256, 300)
    want = table(TorchKernels(), logits.float().cpu(), targets)
    got = table(kernels, logits, targets)
    assert np.abs(got.values - want.values).max() < 1e-4
    assert (got.ranks == want.ranks).all()
    assert np.abs(got.top_values - want.top_values).max() < 1e-4
    # bfloat16 has ties, and either of two equals may be named: the named ones have their values.
    named = logits.gather(1, torch.from_numpy(got.top_ids).cuda().long()).float().cpu().numpy()
    assert np.abs(np.diff(named - got.top_values, axis=1)).max() < 1e-4
    assert all(len(set(row)) == 20 for row in got.top_ids)


@pytest.mark.parametrize("rows", [512, 16])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9}]
)
def test_draws_are_the_reference_s(
    shape: Callable[..., ModelConfig], filters: dict[str, float], rows: int
) -> None:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels = FlashInferKernels(*HEADS)
    logits = torch.randn(rows, 32_003, device="cuda").mul_(2.5).bfloat16()
    rng = np.random.default_rng(1)
    temperatures = rng.choice([0.0, 0.6, 1.0, 1.5], rows).astype(np.float32)
    metadata = SamplingMetadata(
        temperatures=temperatures,
        top_k=np.full(rows, filters.get("top_k", 0), np.int32),
        top_p=np.full(rows, filters.get("top_p", 1.0), np.float32),
        min_p=np.full(rows, filters.get("min_p", 0.0), np.float32),
        keys=rng.integers(0, 2**64, rows, dtype=np.uint64),
    )
    want = TorchKernels().sampling.choose(logits.float().cpu(), metadata).numpy()
    broken = logits.clone()
    broken[3, 7], broken[4, 9], broken[5] = float("nan"), float("inf"), float("-inf")
    failed = kernels.sampling.choose(broken, metadata).cpu().numpy()
    assert (failed[3:6] == NO_TOKEN).all() and (failed >= 0).sum() == rows - 3
    got = kernels.sampling.choose(logits.clone(), metadata).cpu().numpy()
    # The same noise picks the same token but where two are as close as rounding, or where the last
    # place of a filter has ties, of which bfloat16 is full.
    assert (got == want).mean() > (0.8 if filters else 0.99)
    scale = torch.from_numpy(np.maximum(temperatures, 1e-6)).cuda()[:, None]
    probabilities = torch.softmax(logits.float() / scale, dim=-1)
    picked = probabilities.gather(1, torch.from_numpy(got).cuda()[:, None])
    assert (picked > 0).all()
    if "top_k" in filters:
        least = probabilities.topk(int(filters["top_k"]), dim=-1).values[:, -1:]
        assert (picked >= least).all()
    elif "top_p" in filters:  # what is likelier than a kept token is less than p of all
        above = torch.where(probabilities > picked, probabilities, 0.0).sum(dim=-1)
        assert (above < filters["top_p"] + 1e-3).all()
