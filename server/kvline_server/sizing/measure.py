"""What the profile loop measures of each rank's device, and what that leaves for the KV cache.

A rank has its own limit, neighbours, growth and graphs; the budget of all is that of the rank with
the least room.
"""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.memory import HEADROOM, Memory
from kvline_contract.report import Result
from kvline_server.memory import parts
from kvline_server.memory.device import Device
from kvline_server.memory.parts import OwnedPart
from kvline_server.parallel.executor import Executor, Usage
from kvline_server.sizing.diagnosis import Diagnosis
from kvline_server.sizing.settings import EngineSettings


def budget(usage: Usage, reserved: int) -> int:
    """Bytes of a rank for the KV cache beside `reserved` bytes, after the stress (step 6)."""
    growth = max(0, usage.peak - usage.now)
    return usage.limit - usage.used + usage.kv - growth - usage.files - reserved


class Measurement:
    def __init__(
        self,
        executor: Executor,
        device: Device,
        settings: EngineSettings,
        owned: tuple[OwnedPart, ...],
        free_before_weights: tuple[int, ...],
        note: str,
    ) -> None:
        self.executor = executor
        usage = executor.usage()
        self.ranks = tuple(
            Diagnosis(
                device=device,
                settings=settings,
                owned=owned,
                neighbours=each.limit - free,
                rank=rank,
                ranks=executor.ranks,
                usage=each,
                note=note,
            )
            for rank, (each, free) in enumerate(zip(usage, free_before_weights, strict=True))
        )

    def read(self) -> tuple[Usage, ...]:
        """By rank. Kept for the texts of a diagnosis too."""
        usage = self.executor.usage()
        for rank, each in zip(self.ranks, usage, strict=True):
            rank.usage = each
        return usage

    def used(self) -> tuple[int, ...]:
        return tuple(usage.used for usage in self.read())

    def rest(self) -> None:
        """Before a stress: from here on its peak and growth are measured."""
        self.executor.reset_peak()
        for rank, usage in zip(self.ranks, self.read(), strict=True):
            rank.resting = usage.now

    def forget_growth(self) -> None:
        """Before another probe, of less."""
        for rank in self.ranks:
            rank.growth = 0

    def count_growth(self) -> None:
        """What a stress took, whether freed since or kept by the allocator."""
        for rank, usage in zip(self.ranks, self.read(), strict=True):
            rank.growth, rank.stressed = max(rank.growth, usage.peak - rank.resting), True

    def count_graphs(self, before: tuple[int, ...]) -> None:
        """Bytes in use beyond those of `before`."""
        for rank, used, without in zip(self.ranks, self.used(), before, strict=True):
            rank.graphs = max(0, used - without)

    def count_arrived(self) -> None:
        """Bytes that others took since this start began."""
        for rank, usage in zip(self.ranks, self.read(), strict=True):
            ours = usage.now + usage.kv + rank.graphs + parts.outside(rank.owned)
            rank.arrived = max(0, usage.used - ours - rank.neighbours)

    def arrived(self) -> tuple[int, ...]:
        return tuple(rank.arrived for rank in self.ranks)

    def taken_since(self, known: tuple[int, ...]) -> int:
        """Bytes that others took of one device, where it is much, since `known` had arrived."""
        taken = (rank.arrived - past for rank, past in zip(self.ranks, known, strict=True))
        return max(n if rank.much(n) else 0 for rank, n in zip(self.ranks, taken, strict=True))

    @property
    def displaced(self) -> bool:
        return any(rank.displaced for rank in self.ranks)

    def budgets(self, reserved: int) -> tuple[int, ...]:
        return tuple(budget(usage, reserved) for usage in self.read())

    def binding(self) -> Diagnosis:
        """Of the rank with the least room."""
        budgets = self.budgets(0)
        return self.ranks[budgets.index(min(budgets))]

    def free_at_peak(self) -> tuple[int, ...]:
        """Bytes of each rank that were free all the time since `rest`."""
        return tuple(budget(replace(usage, kv=0), 0) for usage in self.read())

    def keep_lowest_free(self) -> int:
        """free_at_peak, as the figure of the final size. -> the smallest"""
        free = self.free_at_peak()
        for rank, nbytes in zip(self.ranks, free, strict=True):
            rank.lowest_free = nbytes
        return min(free)

    def scarcest(self) -> int:
        """The rank that had the least free at the final size."""
        return min(self.ranks, key=lambda rank: rank.lowest_free).rank

    def memory(self, tokens: int, headroom: int) -> tuple[Memory, ...]:
        """Of each rank, by part, at a size of so many tokens."""
        return tuple(
            rank.memory(tokens, usage.kv, headroom + max(0, rank.lowest_free))
            for rank, usage in zip(self.ranks, self.read(), strict=True)
        )

    def crowded(self, result: Result) -> str | None:
        """A warning where other processes on one device lower the budget of all ranks."""
        free = [memory.mib(HEADROOM) for memory in result.ranks]
        binding = self.ranks[free.index(min(free))]
        if len(free) == 1 or not binding.crowded:
            return None
        unused = max(free) - min(free)
        return (
            f"{binding.name} limits every rank: other processes hold {binding.held} MiB of it, "
            f"and up to {unused} MiB of another one stay unused"
        )
