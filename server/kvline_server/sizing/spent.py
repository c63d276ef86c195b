"""What the steps of a stress took, for the one stage that reports them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvline_contract.report import Stage


@dataclass
class Spent:
    """Seconds, and bytes of rank 0's device."""

    ranks: int
    steps: dict[str, float] = field(default_factory=dict)  # by name
    ways: dict[str, float] = field(default_factory=dict)  # of playing them, by their words
    alone: float = 0.0  # that each rank ran the steps alone
    highest: int | None = None  # beyond what was in use before

    def count(self, name: str, seconds: float, nbytes: int) -> None:
        """A step that has ended, with `nbytes` more in use than before the first."""
        self.steps[name] = seconds
        self.highest = nbytes if self.highest is None else max(self.highest, nbytes)

    def count_play(self, how: str, alone: float, whole: float) -> None:
        """Of a step. `how` is empty where it is played in one way only."""
        self.alone += alone
        if how:
            self.ways[how] = self.ways.get(how, 0.0) + whole

    @property
    def slowest_ms(self) -> int:
        return _ms(max(self.steps.values()))

    def stage(self, name: str) -> Stage:
        slowest = max(self.steps, key=self.steps.__getitem__)
        texts = [f"{len(self.steps)} steps, the longest {slowest} {self.slowest_ms} ms"]
        texts += [f"{how} {_ms(seconds)} ms" for how, seconds in self.ways.items()]
        if self.ranks > 1:
            texts.append(f"each of {self.ranks} ranks alone {_ms(self.alone)} ms, then together")
        return Stage(name, _ms(sum(self.steps.values())), self.highest or 0, ", ".join(texts))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
