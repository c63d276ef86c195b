"""Recurrent layers of tiny sizes with a pool of states, of which no slot may be read yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from float64_recurrent import Step, expected, sequences

from kvline_server.kernels.recurrent import Convolution, Decay, DeltaRule, Scan, Sequences, States
from kvline_server.kernels.torch_recurrent import TorchRecurrent

SLOTS = 12
NAN = float("nan")
KERNELS = TorchRecurrent(torch.device("cpu"))


def spread(count: int) -> torch.Tensor:
    return torch.linspace(-3, 1, count)[torch.randperm(count)]


def delta_rule() -> DeltaRule:
    """Three value heads a key head, no size of another one."""
    made = Convolution(torch.randn(2 * 2 * 16 + 6 * 24, 4) / 2)
    return DeltaRule(2, 6, 16, 24, made, Decay(spread(6), spread(6)))


def scan() -> Scan:
    """Two groups of three heads, with biases."""
    channels = 6 * 8 + 2 * 2 * 20
    made = Convolution(torch.randn(channels, 4) / 2, torch.randn(channels))
    return Scan(6, 8, 2, 20, made, Decay(spread(6), spread(6)), torch.randn(6))


@dataclass
class Model:
    """A layer with its pool, of which no slot may be read yet."""

    layer: DeltaRule | Scan
    states: States

    def inputs(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ones are the same for all lengths."""
        torch.manual_seed(1 + seed)
        gates = 12 if isinstance(self.layer, DeltaRule) else 6
        both = torch.randn(rows, len(self.layer.convolution.weight) + gates)
        return both[:, :-gates], both[:, -gates:]  # strided, as parts of one GEMM's output

    def run(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        steps: Sequence[Step],
        kept: Sequence[tuple[int, int, int]] = (),
    ) -> torch.Tensor:
        return self.step(x, gates, sequences(steps, kept))

    def step(self, x: torch.Tensor, gates: torch.Tensor, own: Sequences) -> torch.Tensor:
        plan = KERNELS.plan(own)
        if isinstance(self.layer, DeltaRule):
            return KERNELS.delta_rule(x, gates, self.layer, self.states, plan)
        return KERNELS.scan(x, gates, self.layer, self.states, plan)

    def cut(self, rows: int, cuts: Sequence[int], slot: int, seed: int = 0) -> torch.Tensor:
        """A sequence in chunks that end at `cuts`."""
        x, gates = self.inputs(rows, seed)
        made, at = [], 0
        for end in cuts:
            made.append(self.run(x[at:end], gates[at:end], [(end - at, slot, at > 0)]))
            at = end
        assert at == rows
        return torch.cat(made)

    def want(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return expected(self.layer, *self.inputs(rows, seed))


def fresh(kind: Callable[[], DeltaRule | Scan]) -> Model:
    torch.manual_seed(0)
    layer = kind()
    channels, heads = len(layer.convolution.weight), (SLOTS, 6)
    shape = (16, 24) if isinstance(layer, DeltaRule) else (8, 20)
    states = torch.full((SLOTS, 3, channels), NAN), torch.full((*heads, *shape), NAN)
    return Model(layer, States(*states))
