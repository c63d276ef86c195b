"""A chunk of rows of recurrent layers: row by row, and all rows at once.

Everything is float32. Heads are in two dimensions: those that share a key, or B and C, are the
second. g is the logarithm of each row's decay, and a row with g = 0 and beta = 0, or delta = 0,
changes no state. The exponents of all decays are at most 0: what is masked is masked before exp.

A sequence must have the same bits alone and among others. BLAS has other sums for other numbers of
matrices, so what multiplies matrices takes one sequence at a time. torch's own sigmoid, softplus
and silu have other bits in the last elements of a tensor, where no whole vector is left; exp and
log1p have not, and are all that is used here.
"""

from __future__ import annotations

import torch


def delta_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """As delta_chunk, row by row, of any number of sequences."""
    out = torch.empty_like(v)
    for row in range(q.shape[1]):
        query, key = (x[:, row, :, None, :, None] for x in (q, k))
        state *= g[:, row, :, :, None, None].exp()
        new = v[:, row] - (key * state).sum(dim=-2)
        new *= beta[:, row].unsqueeze(-1)
        state.addcmul_(key, new.unsqueeze(-2))
        out[:, row] = (query * state).sum(dim=-2)
    return out


def delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule (arXiv 2412.06464, section 3.3): with a = (I + strictly lower of beta k
    k^T decay)^-1, what each row adds to the state is a beta (v - e^g k S), whatever S is.
    q, k [sequences, rows, key heads, key dim], v [sequences, rows, key heads, value heads of each,
    value dim], beta, g [sequences, rows, key heads, value heads of each], state [sequences, key
    heads, value heads of each, key dim, value dim], updated in place -> as v"""
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q, k))  # [n, key heads, 1, rows, key dim]
    v = v.permute(0, 2, 3, 1, 4)  # [n, key heads, value heads of each, rows, value dim]
    beta, g = (x.permute(0, 2, 3, 1) for x in (beta, g))
    total, between = _decays(g)
    reach, left = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    scale, dim = beta.unsqueeze(-1), v.shape[-1]
    # The solver takes its diagonal as 1 and does not read what is above it.
    system = (k @ k.transpose(-1, -2)) * between * scale
    wanted = torch.cat((v * scale, k * (scale * reach)), dim=-1)
    solved: torch.Tensor = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    )
    new = solved[..., :dim] - solved[..., dim:] @ state
    out = (q * reach) @ state + (q @ k.transpose(-1, -2) * between) @ new
    state.mul_(reach[..., -1:, :]).add_((k * left).transpose(-1, -2) @ new)
    return out.permute(0, 3, 1, 2, 4)


def scan_rows(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    delta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """As scan_chunk, row by row, of any number of sequences."""
    out = torch.empty_like(x)
    for row in range(x.shape[1]):
        state *= g[:, row, :, :, None, None].exp()
        added = x[:, row] * delta[:, row].unsqueeze(-1)
        state.addcmul_(added.unsqueeze(-1), b[:, row, :, None, None, :])
        out[:, row] = (state * c[:, row, :, None, None, :]).sum(dim=-1)
    return out


def scan_chunk(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    delta: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Mamba2's scan in its dual form (arXiv 2405.21060, section 6), without the skip.
    x [sequences, rows, groups, heads of each, head dim], b, c [sequences, rows, groups, state dim],
    delta, g [sequences, rows, groups, heads of each], state [sequences, groups, heads of each, head
    dim, state dim], updated in place -> as x"""
    x = x.permute(0, 2, 3, 1, 4)  # [n, groups, heads of each, rows, head dim]
    b, c = (each.transpose(1, 2).unsqueeze(2) for each in (b, c))  # [n, groups, 1, rows, state dim]
    delta, g = (each.permute(0, 2, 3, 1) for each in (delta, g))
    total, between = _decays(g)
    reach, left = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
    added = x * delta.unsqueeze(-1)
    out = (c @ b.transpose(-1, -2) * between) @ added + (c * reach) @ state.transpose(-1, -2)
    state.mul_(reach[..., -1:, :]).add_((added * left).transpose(-1, -2) @ b)
    return out.permute(0, 3, 1, 2, 4)


def _decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of g from a chunk's first row to each one, and the decays from each row to each later
    one, 0 to earlier ones. [..., rows] -> [..., rows], [..., rows (to), rows (from)]"""
    total = g.cumsum(dim=-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=g.device).tril_()
    return total, between.masked_fill_(~later, float("-inf")).exp_()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / x.neg().exp_().add_(1)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), in float32 x itself from 20 on."""
    return torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())
