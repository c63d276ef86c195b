"""The requests of docs/performance.md's offline figures, which vLLM and SGLang got too."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float = 0.6
    prompt_logprobs: int | None = None
    counts_input: bool = True

    def make(self, vocabulary: int) -> list[tuple[list[int], int]]:
        rng = random.Random(0)
        prompts = [
            [rng.randrange(10, vocabulary - 10) for _ in range(rng.randint(*self.prompt))]
            for _ in range(self.requests)
        ]
        return [(p, rng.randint(*self.output)) for p in prompts]

    def counted(self, requests: list[tuple[list[int], int]]) -> int:
        return sum(o + (len(p) if self.counts_input else 0) for p, o in requests)


WORKLOADS = {
    "r512": Workload(3000, (1, 512), (1, 128)),
    "r512lp-top0": Workload(3000, (1, 512), (1, 128), 1.0, 0),
    "r512lp-top20": Workload(3000, (1, 512), (1, 128), 1.0, 20),
    "long": Workload(128, (4000, 7000), (64, 256)),
    "nano": Workload(256, (100, 1024), (100, 1024), counts_input=False),
}
