"""Counts steps of some kinds, and those of them in which nothing but the runs of mixers was outside
captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvline_server.worker.step import Step
from kvline_server.worker.worker import Worker

Is = Callable[[Step], bool]


def several(step: Step) -> bool:
    """With chunks of several prompts."""
    return step.layout.sequences - step.layout.decodes > 1


def with_images(vocabulary: int) -> Is:
    """Of a model with so many tokens; those of images count on behind them."""
    return lambda step: bool((step.tokens >= vocabulary).any())


class Captured:
    def __init__(self, runner: Worker, kinds: Mapping[str, Is]) -> None:
        assert runner.graphs is not None
        self.kinds = kinds
        self.steps, self.captured = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self._replays, graphs = 0, runner.graphs
        run_graphs, replay = graphs.run, graphs._pool.replay
        segments = len(runner.arena.layers())  # and the last, where there are logits

        def counted(step: Step) -> torch.Tensor:
            before = self._replays
            hidden = run_graphs(step)
            wanted = segments + (len(step.logits_indices) > 0)
            whole = self._replays - before in (1, wanted)  # 1: a whole step
            for kind in [each for each, of_kind in kinds.items() if of_kind(step)]:
                self.steps[kind] += 1
                self.captured[kind] += whole
            return hidden

        def replayed(graph: Any) -> None:
            self._replays += 1
            replay(graph)

        graphs.run = counted  # type: ignore[method-assign]
        graphs._pool.replay = replayed  # type: ignore[method-assign]
        self._own = graphs, run_graphs, replay

    def share(self, kind: str) -> float:
        """Of its steps; 0 where there were none, which shows nothing."""
        return self.captured[kind] / max(1, self.steps[kind])

    def text(self, kind: str) -> str:
        return f"{self.share(kind):.3f} of {self.steps[kind]}"

    def close(self) -> None:
        graphs, run_graphs, replay = self._own
        graphs.run, graphs._pool.replay = run_graphs, replay  # type: ignore[method-assign]
