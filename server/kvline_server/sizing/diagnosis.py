"""Why no budget could be validated: memory by part, the binding constraint, settings to change.

Pure arithmetic on what was measured of one rank, which texts name where there are several. They go
to the termination message and from there to the resource's status, so that no log is needed to act.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract.memory import (
    ACTIVATIONS,
    COLLECTIVES,
    GRAPHS,
    HEADROOM,
    KV_CACHE,
    OTHERS,
    Memory,
    Part,
    rank_name,
)
from kvline_contract.report import Attempt, Binding, Direction, Knob
from kvline_server.errors import ContextDoesNotFit, OutOfMemory
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.parts import OwnedPart
from kvline_server.parallel.executor import Usage
from kvline_server.sizing.settings import EngineSettings

MEMORY_FIELD = "spec.resources.memory"
CROWDED = 20  # other processes are named as the reason above 1/CROWDED of the device


@dataclass(slots=True)
class Diagnosis:
    device: Device
    settings: EngineSettings
    owned: tuple[OwnedPart, ...]  # whose fixed bytes the load puts on the device
    neighbours: int = 0  # bytes that other processes held before the weights were loaded
    arrived: int = 0  # bytes that other processes have taken since
    growth: int = 0  # bytes that the stress added
    graphs: int = 0  # bytes that captured graphs took
    resting: int = 0  # bytes in use when the newest stress began
    lowest_free: int = 0  # bytes beyond what is reserved, at the final size
    rank: int = 0
    ranks: int = 1
    usage: Usage | None = None  # the newest; None while weights are loaded

    @property
    def limit(self) -> int:
        return self.device.limit if self.usage is None else self.usage.limit

    @property
    def free(self) -> int:
        used = self.device.used() if self.usage is None else self.usage.used
        return max(0, self.limit - used)

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.ranks, self.device.gpu)

    def memory(self, kv_bytes: int, free_bytes: int) -> Memory:
        """Memory by part; `others` is the rest, so that the parts add up exactly."""
        total = self.limit // MIB
        parts = [
            *(Part(part.name, part.fixed // MIB) for part in self.owned if part.fixed),
            Part(ACTIVATIONS, self.growth // MIB),
            Part(GRAPHS, self.graphs // MIB),
            Part(KV_CACHE, kv_bytes // MIB),
            Part(HEADROOM, max(0, free_bytes) // MIB),
        ]
        rest = total - sum(part.mib for part in parts)
        held = f"{self.held} MiB of other processes" if self.crowded else None
        if held and self.ranks > 1:
            held += f" on {self.name}"
        gpu = self.rank if self.ranks > 1 and self.device.gpu else None
        return Memory(total, (*parts, Part(OTHERS, rest, held)), gpu)

    @property
    def loaded_bytes(self) -> int:
        """What the load puts on the device: weights, nearly all."""
        return sum(part.fixed for part in self.owned)

    @property
    def collectives(self) -> int:
        """What the exchange between ranks takes, outside the allocator whose bytes are counted."""
        return sum(part.fixed for part in self.owned if part.name == COLLECTIVES)

    def weights_do_not_fit(self, free: int) -> OutOfMemory:
        need = (max(0, self.loaded_bytes - free) + self.settings.reserved()) // MIB + 1
        return OutOfMemory(
            f"the weights ({self.loaded_bytes // MIB} MiB) and their runtime do not fit: "
            f"{max(0, free) // MIB} MiB of {self.limit // MIB} MiB are free{self._where()}; "
            + self._more(f"by {need} MiB and what activations and the KV cache take"),
            memory=self.memory(0, free),
            binding=self._binding(Binding.WEIGHTS),
            knobs=self._memory_knob(),
        )

    def nothing_left(self, tokens: int) -> OutOfMemory:
        return OutOfMemory(
            f"no memory is left for the KV cache: {self._named()} and "
            f"activations {self.growth // MIB} MiB leave room for {max(tokens, 0)} tokens "
            f"{self._limit()} beside {self._reserved()}; {self._others()}{self._advice()}",
            memory=self.memory(0, self.free),
            binding=self._binding(
                Binding.ACTIVATIONS if self.growth > self.loaded_bytes else Binding.WEIGHTS
            ),
            knobs=self._knobs(),
        )

    def context_does_not_fit(self, tokens: int, asked: int) -> ContextDoesNotFit:
        largest = tokens // PAGE_SIZE * PAGE_SIZE
        budget = f"the budget of {self.name}" if self.ranks > 1 else "the budget"
        return ContextDoesNotFit(
            f"spec.engine.maxModelLen is {asked}, {budget} holds {tokens} tokens; "
            f"{self._others()}the largest length that fits is {largest}",
            memory=self.memory(0, self.free),
            binding=self._binding(Binding.CONTEXT),
            largest_max_model_len=largest,
            knobs=(
                Knob("spec.engine.maxModelLen", Direction.LOWER, largest),
                *self._memory_knob(),
            ),
        )

    def killed_while_probing(self, attempts: tuple[Attempt, ...]) -> OutOfMemory:
        return OutOfMemory(
            f"killed for memory while probing with the smallest KV cache: {self._named()} "
            f"{self._limit()}; {self._advice()}",
            memory=self.memory(0, 0),
            binding=Binding.ACTIVATIONS,
            knobs=self._knobs(),
            attempts=attempts,
        )

    def out_of_memory(self, attempts: tuple[Attempt, ...], pinned: bool) -> OutOfMemory:
        tried = ", ".join(str(a.target_tokens) for a in attempts if a.number)
        if pinned:
            knobs: tuple[Knob, ...] = (
                Knob("spec.capacity.kvTokens", Direction.LOWER),
                *self._memory_knob(),
            )
            text = f"spec.capacity.kvTokens pins {tried} tokens, which did not survive the stress"
        else:
            knobs = self._knobs()
            text = f"no size survived the stress; tried {tried or 'the probe alone'} tokens"
        return OutOfMemory(
            f"{text}: {self._named()}, activations {self.growth // MIB} MiB, "
            f"{self._reserved()}, {self._limit()}; {self._others()}{_advice(knobs)}",
            memory=self.memory(0, self.free),
            binding=self._binding(Binding.HOST_MEMORY),
            knobs=knobs,
            attempts=attempts[-5:],
        )

    def _named(self) -> str:
        return ", ".join(f"{p.name} {p.fixed // MIB} MiB" for p in self.owned if p.fixed)

    def _limit(self) -> str:
        return f"under a limit of {self.limit // MIB} MiB{self._where()}"

    def _where(self) -> str:
        return f" on {self.name}" if self.ranks > 1 else ""

    def _knobs(self) -> tuple[Knob, ...]:
        return (
            *self._memory_knob(),
            Knob("spec.engine.maxPrefillTokens", Direction.LOWER),
            Knob("spec.engine.maxRunningRequests", Direction.LOWER),
            Knob("spec.engine.maxModelLen", Direction.LOWER),
            Knob("spec.capacity.headroomMiB", Direction.LOWER),
        )

    def _memory_knob(self) -> tuple[Knob, ...]:
        """Only a container's memory can be raised, not a GPU's."""
        return () if self.device.gpu else (Knob(MEMORY_FIELD, Direction.RAISE),)

    def _more(self, how_much: str) -> str:
        if self.device.gpu:
            return self._others() + "take a GPU with more memory"
        return f"raise {MEMORY_FIELD} {how_much}"

    def _reserved(self) -> str:
        text = f"{self.settings.headroom_mib} MiB of headroom"
        clients = self.settings.client_bytes // MIB
        return f"{text} and {clients} MiB for HTTP clients" if clients else text

    def _others(self) -> str:
        if not self.crowded:
            return ""
        gpu = self.name if self.ranks > 1 else "this GPU"
        text = f"other processes hold {self.held} MiB of {gpu}"
        if self.displaced:
            text += f", {self.arrived // MIB} MiB of it taken since this start began"
        return f"{text}; "

    @property
    def held(self) -> int:
        """MiB of other processes."""
        return (self.neighbours + self.arrived) // MIB

    @property
    def crowded(self) -> bool:
        """Whether other processes hold much of the device."""
        return self.much(self.neighbours + self.arrived)

    @property
    def displaced(self) -> bool:
        """Whether other processes took much of the device during the measurement."""
        return self.much(self.arrived)

    def much(self, nbytes: int) -> bool:
        return self.device.gpu and nbytes > self.limit // CROWDED

    def _binding(self, otherwise: Binding) -> Binding:
        if self.crowded:
            return Binding.NEIGHBOURS
        if self.device.gpu and otherwise is Binding.HOST_MEMORY:
            return Binding.ACTIVATIONS
        return otherwise

    def _advice(self) -> str:
        return self._others() + _advice(self._knobs())


def _advice(knobs: tuple[Knob, ...]) -> str:
    return ", ".join(f"{knob.direction} {knob.spec_field}" for knob in knobs)
