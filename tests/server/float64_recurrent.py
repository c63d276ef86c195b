"""Recurrent layers in float64, one row after the other: the oracle of the tests of all backends;
and the sequences of their steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvline_server.kernels.recurrent import (
    DUMMY,
    Convolution,
    DeltaRule,
    Scan,
    Sequences,
    Snapshots,
)


def expected(
    layer: DeltaRule | Scan, x: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one sequence from its beginning: outputs [rows, width], and behind the last row the
    inputs and the matrices of its state; float64. x and gates as in Recurrent: qkv and ba, or xbc
    and dt."""
    padded = torch.cat((x.new_zeros((3, x.shape[1])), x)).double()
    mixed = _convolved(padded, layer.convolution)
    if isinstance(layer, DeltaRule):
        out, matrices = _delta_rule(mixed, gates.double(), layer)
    else:
        out, matrices = _scan(mixed, gates.double(), layer)
    return out, padded[-3:], matrices


def _convolved(padded: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    channels, width = convolution.weight.shape
    made = torch.nn.functional.conv1d(
        padded.t().unsqueeze(0),
        convolution.weight.double().unsqueeze(1),
        None if convolution.bias is None else convolution.bias.double(),
        groups=channels,
    )
    assert width == 4
    return torch.nn.functional.silu(made.squeeze(0).t())


def _delta_rule(
    mixed: torch.Tensor, ba: torch.Tensor, layer: DeltaRule
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, heads = layer.key_heads * layer.key_dim, layer.value_heads
    q, k, v = torch.split(mixed, [keys, keys, heads * layer.value_dim], dim=1)
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            heads // layer.key_heads, 1
        )
        for x in (part.view(len(mixed), layer.key_heads, -1) for part in (q, k))
    )
    v = v.view(len(mixed), heads, -1)
    b, a = torch.split(ba, heads, dim=1)
    beta, decay = b.sigmoid(), _decays(a, layer)[1]
    state, out = mixed.new_zeros((heads, layer.key_dim, layer.value_dim)), torch.empty_like(v)
    for row in range(len(mixed)):
        state = state * decay[row].view(-1, 1, 1)
        new = v[row] - torch.einsum("hkv,hk->hv", state, k[row])
        state = state + torch.einsum("h,hk,hv->hkv", beta[row], k[row], new)
        out[row] = torch.einsum("hkv,hk->hv", state, q[row]) / layer.key_dim**0.5
    return out.flatten(1), state


def _scan(mixed: torch.Tensor, dt: torch.Tensor, layer: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    shared = layer.groups * layer.state_dim
    x, b, c = torch.split(mixed, [layer.heads * layer.head_dim, shared, shared], dim=1)
    x = x.view(len(mixed), layer.heads, layer.head_dim)
    b, c = (
        each.view(len(mixed), layer.groups, -1).repeat_interleave(layer.heads // layer.groups, 1)
        for each in (b, c)
    )
    delta, decay = _decays(dt, layer)
    state = mixed.new_zeros((layer.heads, layer.head_dim, layer.state_dim))
    out = torch.empty_like(x)
    for row in range(len(mixed)):
        added = torch.einsum("h,hp,hn->hpn", delta[row], x[row], b[row])
        state = state * decay[row].view(-1, 1, 1) + added
        out[row] = torch.einsum("hpn,hn->hp", state, c[row])
        out[row] += layer.skip.double().view(-1, 1) * x[row]
    return out.flatten(1), state


def _decays(x: torch.Tensor, layer: DeltaRule | Scan) -> tuple[torch.Tensor, torch.Tensor]:
    delta = torch.nn.functional.softplus(x + layer.decay.dt_bias.double())
    return delta, (-layer.decay.a_log.double().exp() * delta).exp()


# A sequence's rows, its slot, and whether that is read, or which.
Step = tuple[int, int, bool | int]


def sequences(steps: Sequence[Step], kept: Sequence[tuple[int, int, int]] = ()) -> Sequences:
    """`kept` are snapshots: of which sequence, behind which row, in which slot."""
    counts, slots, read = zip(*steps, strict=True)
    sources = [
        (slot if one else DUMMY) if isinstance(one, bool) else one
        for slot, one in zip(slots, read, strict=True)
    ]
    columns = np.array(kept, np.int64).reshape(-1, 3).T
    return Sequences(
        np.cumsum((0, *counts)).astype(np.int32),
        np.array(slots),
        np.array(sources),
        Snapshots(*columns) if kept else None,
    )
