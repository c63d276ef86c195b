"""How many KV tokens a replica must have, and where that threshold comes from. Pure.

Tokens are compared within one GPU model only, and within one number of ranks (gate.py). Replicas
of a candidate must reach spec.rollout.minCapacityPercent of the baseline and
spec.capacity.minKVTokens; replicas of an accepted revision only the latter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvline_contract.codec import MAX_KEY
from kvline_contract.launch import MAX_GATE_GPUS, VERSION, GateFile


@dataclass(frozen=True, slots=True)
class Threshold:
    tokens: int  # 0: none
    source: str
    baseline: int = 0  # that `tokens` is a percentage of; 0: none
    by_minimum: bool = False


class HasTokens(Protocol):
    @property
    def gpu(self) -> str: ...
    @property
    def tokens(self) -> int: ...


Named = TypeVar("Named")
Sized = TypeVar("Sized", bound=HasTokens)


@dataclass(frozen=True, slots=True)
class Thresholds:
    minimum: int = 0  # spec.capacity.minKVTokens
    percent: int = 0  # spec.rollout.minCapacityPercent
    baseline: dict[str, int] = field(default_factory=dict)  # tokens by GPU model

    def of(self, gpu: str) -> Threshold:
        """The threshold of a replica on this GPU model; empty for a CPU."""
        base, share = self.baseline.get(gpu, 0), self._share(gpu)
        if share and share >= self.minimum:
            text = f"{self.percent} % of the baseline {base} on {device(gpu)}"
            return Threshold(share, text, base)
        if self.minimum:
            return Threshold(self.minimum, "spec.capacity.minKVTokens", base, by_minimum=True)
        return Threshold(0, "", base)

    def unknown(self, gpu: str) -> bool:
        """Whether other GPU models have a baseline and this one has none."""
        return bool(self.baseline) and gpu not in self.baseline

    def distance(self, replica: HasTokens) -> tuple[float, int]:
        """The ratio of a replica's tokens to its threshold (below 1: too few), then the tokens."""
        return replica.tokens / max(1, self.of(replica.gpu).tokens), replica.tokens

    def lowest(self, sized: Iterable[tuple[Named, Sized]]) -> tuple[Named, Sized]:
        """The replica with the smallest distance."""
        return min(sized, key=lambda pair: self.distance(pair[1]))

    def gate(self, is_open: bool) -> GateFile:
        """The gate file that pods mount; servers too old for the map use its smallest entry."""
        shares = {gpu: share for gpu in self.baseline if (share := self._share(gpu))}
        listed = sorted(gpu for gpu in shares if len(gpu) <= MAX_KEY)[:MAX_GATE_GPUS]
        return GateFile(
            VERSION,
            is_open,
            self.minimum,
            min(shares.values(), default=0),
            {gpu: shares[gpu] for gpu in listed} or None,
        )

    def _share(self, gpu: str) -> int:
        return -(-self.percent * self.baseline.get(gpu, 0) // 100)


def device(gpu: str) -> str:
    return gpu or "a CPU"
