"""How many KV tokens and sequences a replica must have, and where a threshold comes from. Pure.

Both are compared within one GPU model only, and within one number of ranks (gate.py). Replicas of a
candidate must reach spec.rollout.minCapacityPercent of the baseline and the minimum of
spec.capacity; replicas of an accepted revision only the latter. Sequences bound a model whose
layers keep recurrent states, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kvline_contract.codec import MAX_KEY
from kvline_contract.launch import MAX_GATE_GPUS, VERSION, GateFile
from kvline_operator.observe.slots import Slots

TOKENS, SEQUENCES = "KV tokens", "sequences"


@dataclass(frozen=True, slots=True)
class Threshold:
    least: int  # 0: none
    source: str  # where there is none: why, or empty
    baseline: int = 0  # that `least` is a percentage of; 0: none
    by_minimum: bool = False

    def text(self, verb: str = "required", grouped: bool = False) -> str:
        """`grouped`: with commas in numbers."""
        if not self.least:
            return f"none are {verb}" + (f", {self.source}" if self.source else "")
        least = f"{self.least:,}" if grouped else str(self.least)
        return f"{least} are {verb} ({self.source})"


@dataclass(frozen=True, slots=True)
class Judged:
    """One of a replica's two capacities beside its threshold."""

    unit: str
    measured: int
    limit: Threshold

    @property
    def short(self) -> int:
        return max(0, self.limit.least - self.measured)

    def text(self, verb: str = "required") -> str:
        made = f"{self.measured} {self.unit}, {self.limit.text(verb)}"
        return f"{made}: {self.short} short" if self.short else made


class Sized(Protocol):
    @property
    def gpu(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def slots(self) -> Slots | None: ...


Named = TypeVar("Named")
Replica = TypeVar("Replica", bound=Sized)


@dataclass(frozen=True, slots=True)
class Thresholds:
    minimum: int = 0  # spec.capacity.minKVTokens
    percent: int = 0  # spec.rollout.minCapacityPercent
    baseline: Mapping[str, int] = field(default_factory=dict)  # tokens by GPU model
    min_sequences: int = 0  # spec.capacity.minSequences
    sequences: Mapping[str, int] = field(default_factory=dict)  # baseline by GPU model
    given_up: str = ""  # why sequences are compared with no baseline

    @classmethod
    def minimums(cls, tokens: int, sequences: int) -> Thresholds:
        """Of spec.capacity alone, without a baseline."""
        return cls(minimum=tokens, min_sequences=sequences)

    def of(self, gpu: str) -> Threshold:
        """Of KV tokens, of a replica on this GPU model; empty for a CPU."""
        return self._of(gpu, self.baseline, self.minimum, "minKVTokens")

    def of_sequences(self, gpu: str) -> Threshold:
        found = self._of(gpu, self.sequences, self.min_sequences, "minSequences")
        return found if found.least else replace(found, source=self.given_up)

    def judged(self, replica: Sized) -> tuple[Judged, ...]:
        """KV tokens, and sequences of a model that they bound."""
        tokens = Judged(TOKENS, replica.tokens, self.of(replica.gpu))
        if replica.slots is None:
            return (tokens,)
        found = self.of_sequences(replica.gpu)
        return tokens, Judged(SEQUENCES, replica.slots.sequences, found)

    def short(self, replica: Sized) -> Judged | None:
        """The first capacity that is less than its threshold."""
        return next((each for each in self.judged(replica) if each.short), None)

    def unknown(self, gpu: str) -> bool:
        """Whether other GPU models have a baseline and this one has none."""
        return bool(self.baseline) and gpu not in self.baseline

    def distance(self, replica: Sized) -> tuple[float, int]:
        """The smallest ratio of a replica's capacities to their thresholds (below 1: too little),
        then the tokens."""
        tokens, *others = self.judged(replica)
        compared = [tokens, *(each for each in others if each.limit.least)]
        ratios = (each.measured / max(1, each.limit.least) for each in compared)
        return min(ratios), replica.tokens

    def lowest(self, sized: Iterable[tuple[Named, Replica]]) -> tuple[Named, Replica]:
        """The replica with the smallest distance."""
        return min(sized, key=lambda pair: self.distance(pair[1]))

    def gate(self, is_open: bool) -> GateFile:
        """The gate file that pods mount; servers too old for the map use its smallest entry."""
        shares = {gpu: share for gpu in self.baseline if (share := self._share(self.baseline[gpu]))}
        listed = sorted(gpu for gpu in shares if len(gpu) <= MAX_KEY)[:MAX_GATE_GPUS]
        fewest = min(map(self._share, self.sequences.values()), default=0)
        return GateFile(
            VERSION,
            is_open,
            self.minimum,
            min(shares.values(), default=0),
            {gpu: shares[gpu] for gpu in listed} or None,
            required_sequences=max(self.min_sequences, fewest) or None,
        )

    def _of(self, gpu: str, known: Mapping[str, int], minimum: int, field: str) -> Threshold:
        base = known.get(gpu, 0)
        share = self._share(base)
        if share and share >= minimum:
            text = f"{self.percent} % of the baseline {base} on {device(gpu)}"
            return Threshold(share, text, base)
        if minimum:
            return Threshold(minimum, f"spec.capacity.{field}", base, by_minimum=True)
        return Threshold(0, "", base)

    def _share(self, baseline: int) -> int:
        return -(-self.percent * baseline // 100)


def device(gpu: str) -> str:
    return gpu or "a CPU"
