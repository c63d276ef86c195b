"""Why no budget could be validated: memory by part, the binding constraint, settings to change.

Pure arithmetic on what was measured of one rank, which texts name where there are several. They go
to the termination message and from there to the resource's status, so that no log is needed to act.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract.memory import (
    ACTIVATIONS,
    CODE,
    GRAPHS,
    HEADROOM,
    KV_CACHE,
    PROCESSES,
    RUNTIME,
    SLACK,
    SNAPSHOTS,
    STATES,
    Memory,
    rank_name,
)
from kvline_contract.report import Attempt, Binding, Direction, Knob
from kvline_server.errors import ContextDoesNotFit, OutOfMemory
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.parts import OwnedPart, growing, lent, loaded, outside
from kvline_server.parallel.executor import Usage
from kvline_server.sizing.breakdown import Taken, needed, sentence, whole
from kvline_server.sizing.offers import (
    CONTEXT_FIELD,
    MEMORY_FIELD,
    Offer,
    advice,
    knobs,
)
from kvline_server.sizing.settings import EngineSettings

SMALLEST = 1024  # tokens of the cache while probing
CROWDED = 20  # other processes are named as the reason above 1/CROWDED of the device
RUNTIME_CPU = "Python, torch and buffers of the engine"
RUNTIME_GPU = "kernels and buffers of the engine"
BEFORE = "in use before, CUDA included"
UNKNOWN = "at least: the stress ended here"


@dataclass(slots=True)
class Diagnosis:
    device: Device
    settings: EngineSettings
    owned: tuple[OwnedPart, ...]  # whose fixed bytes the load puts on the device
    neighbours: int = 0  # bytes that other processes held before the weights were loaded
    arrived: int = 0  # bytes that other processes have taken since
    stressed: bool = False  # the stress was survived, and so its growth is known
    growth: int = 0  # bytes that the stress added
    graphs: int = 0  # bytes that captured graphs took
    resting: int = 0  # bytes in use when the newest stress began
    lowest_free: int = 0  # bytes beyond what is reserved, at the final size
    rank: int = 0
    ranks: int = 1
    usage: Usage | None = None  # the newest; None while weights are loaded
    note: str = ""  # Backend's

    @property
    def limit(self) -> int:
        return self.device.limit if self.usage is None else self.usage.limit

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.ranks, self.device.gpu)

    def memory(self, kv_tokens: int, kv_bytes: int, free_bytes: int) -> Memory:
        """Of a validated size, with `free_bytes` at its stress."""
        usage = self._used()
        parts = [
            *self._owned(),
            Taken(ACTIVATIONS, self.growth),
            Taken(GRAPHS, self.graphs),
            Taken(KV_CACHE, kv_bytes - sum(part.nbytes for part in self._mapped())),
            *self._mapped(),
            Taken(HEADROOM, free_bytes),
            *self._outside(usage),
            *self._lent(kv_tokens),
        ]
        return whole(self.limit, parts, self._runtime_detail(), self._gpu())

    def failed(self) -> Memory:
        """Of a start that failed, by what it measured: what each part takes, what is reserved, and
        what they leave for the KV cache."""
        parts = self._resting()
        if self.stressed:
            parts += [*self._lent(), Taken(ACTIVATIONS, self.growth), *self._spare()]
        else:  # the stress did not survive: it took all that was left, and needs more
            left = self.limit - sum(max(0, part.nbytes) for part in parts)
            parts.append(Taken(ACTIVATIONS, left, UNKNOWN))
        return needed(self.limit, parts, self._gpu())

    def _resting(self) -> list[Taken]:
        """What is in use between stresses, without a KV cache."""
        usage = self._used()
        beside = self._outside(usage)
        others = sum(part.nbytes for part in beside if part.name == PROCESSES)
        named = self.loaded_bytes + self.graphs + others + self._kept(usage)
        runtime = Taken(RUNTIME, usage.used - usage.kv - named, self._runtime_detail())
        return [*self._owned(), Taken(GRAPHS, self.graphs), runtime, *beside]

    @property
    def loaded_bytes(self) -> int:
        """What the load puts on the device: weights, nearly all."""
        return loaded(self.owned)

    def weights_do_not_fit(self, free: int) -> OutOfMemory:
        """`free` bytes were free before they were loaded."""
        device, used = self.device, self.limit - free
        usage = Usage(self.limit, used, device.now(), 0, 0, device.working_files())
        runtime = Taken(RUNTIME, 0 if device.gpu else usage.now, self._runtime_detail())
        parts = [
            *self._owned(),
            runtime,
            *self._outside(usage),
            *self._lent(),
            *self._spare(),
        ]
        memory = needed(self.limit, parts, self._gpu())
        offers = () if self.device.gpu else (self._more_memory(parts),)
        weights = (self.loaded_bytes - outside(self.owned)) // MIB
        return OutOfMemory(
            f"the weights ({weights} MiB) and their runtime do not fit: "
            f"{max(0, free) // MIB} MiB of {self.limit // MIB} MiB are free{self._where()}; "
            f"{sentence(memory)}; {self._others()}{self._advice(offers)}"
            + ("" if self.device.gpu else ", and more by what activations and the KV cache take"),
            memory=memory,
            binding=self._binding(Binding.WEIGHTS),
            knobs=knobs(offers),
        )

    def slots_do_not_fit(self, free: int, offers: tuple[Offer, ...]) -> OutOfMemory:
        """Those of recurrent states, in the `free` bytes that weights leave."""
        parts = [part.fixed for part in self.owned if part.name in (STATES, SNAPSHOTS)]
        memory = needed(self.limit, [*self._owned(), *self._lent(), *self._spare()], self._gpu())
        what = (
            f"{self.settings.max_running_requests} requests and {self.settings.snapshots} prefix "
            f"snapshots ({sum(parts) // MIB} MiB)"
        )
        return OutOfMemory(
            f"the recurrent states of {what} do not fit: the weights leave {max(0, free) // MIB} "
            f"MiB of {self.limit // MIB} MiB{self._where()}; {sentence(memory)}; "
            f"{self._others()}{self._advice(offers)}",
            memory=memory,
            binding=self._binding(Binding.WEIGHTS),
            knobs=knobs(offers),
        )

    def untried(self, what: str, lower: tuple[Offer, ...]) -> OutOfMemory:
        """Memory was missing before a stress was played. `lower` are settings that might help."""
        parts = [*self._resting(), *self._lent(), *self._spare()]
        memory = needed(self.limit, parts, self._gpu())
        offers = tuple(o for o in lower if o.knob.direction is Direction.LOWER)
        if not self.device.gpu:
            offers = (self._more_memory(parts), *offers)
        return OutOfMemory(
            f"no memory is left for the stress: {what}{self._where()}; {sentence(memory)}; "
            f"{self._others()}{self._advice(offers)}",
            memory=memory,
            binding=self._binding(Binding.HOST_MEMORY),
            knobs=knobs(offers),
        )

    def nothing_left(self, tokens: int, offers: tuple[Offer, ...]) -> OutOfMemory:
        memory = self.failed()
        return OutOfMemory(
            f"no memory is left for the KV cache{self._where()}: {sentence(memory)}; that holds "
            f"{max(tokens, 0)} tokens, and a start needs {2 * PAGE_SIZE}; "
            f"{self._others()}{self._advice(offers)}",
            memory=memory,
            binding=self._binding(
                Binding.ACTIVATIONS if self.growth > self.loaded_bytes else Binding.WEIGHTS
            ),
            knobs=knobs(offers),
        )

    def context_does_not_fit(
        self, tokens: int, asked: int, offers: tuple[Offer, ...]
    ) -> ContextDoesNotFit:
        largest = max(0, tokens // PAGE_SIZE * PAGE_SIZE)
        budget = f"the budget of {self.name}" if self.ranks > 1 else "the budget"
        memory = self.failed()
        all_offers = (Offer.of_context(largest, tokens), *offers) if largest else offers
        return ContextDoesNotFit(
            f"{CONTEXT_FIELD} is {asked}, {budget} holds {tokens} tokens; "
            f"{self._others()}the largest length that fits is {largest}; "
            f"{sentence(memory)}; {self._advice(offers)}",
            memory=memory,
            binding=self._binding(Binding.CONTEXT),
            largest_max_model_len=largest,
            knobs=knobs(all_offers),
        )

    def killed_while_probing(
        self, attempts: tuple[Attempt, ...], offers: tuple[Offer, ...]
    ) -> OutOfMemory:
        memory = self.failed()
        return OutOfMemory(
            f"killed for memory while probing with the smallest KV cache: {sentence(memory)}"
            f"{self._where()}; {self._others()}{self._advice(offers)}",
            memory=memory,
            binding=Binding.ACTIVATIONS,
            knobs=knobs(offers),
            attempts=attempts[-5:],
        )

    def out_of_memory(
        self, attempts: tuple[Attempt, ...], pinned: bool, offers: tuple[Offer, ...]
    ) -> OutOfMemory:
        tried = ", ".join(str(a.target_tokens) for a in attempts if a.number)
        if pinned:
            text = f"spec.capacity.kvTokens pins {tried} tokens, which did not survive the stress"
        else:
            sizes = f"{tried} tokens" if tried else "the probe alone"
            text = f"no size survived the stress; tried {sizes}"
        memory = self.failed()
        return OutOfMemory(
            f"{text}: {sentence(memory)}{self._where()}; {self._others()}{self._advice(offers)}",
            memory=memory,
            binding=self._binding(Binding.HOST_MEMORY),
            knobs=knobs(offers),
            attempts=attempts[-5:],
        )

    def _owned(self) -> list[Taken]:
        return [Taken(part.name, part.fixed, part.detail) for part in self.owned if part.fixed]

    def _lent(self, kv_tokens: int = 0) -> list[Taken]:
        """Beside a KV cache of so many tokens. On a GPU these are few bytes, of the runtime."""
        if self.device.gpu:
            return []
        taken = [Taken(p.name, lent([p], kv_tokens), p.detail) for p in self.settings.lent]
        return [part for part in taken if part.nbytes >= MIB]

    def _mapped(self) -> list[Taken]:
        """With the KV cache, whatever its size."""
        taken = [Taken(p.name, self.settings.mapped([p]), p.detail) for p in self.owned]
        return [part for part in taken if part.nbytes]

    def _outside(self, usage: Usage) -> list[Taken]:
        """What is not the engine's own: other processes first."""
        if self.device.gpu:
            held = self.neighbours + (self.arrived if self.displaced else 0)
            detail = f"{self.held} MiB of other processes" if self.crowded else None
            if detail and self.ranks > 1:
                detail += f" on {self.name}"
            return [Taken(PROCESSES, held, detail or BEFORE)]
        parts = [
            Taken(PROCESSES, usage.used - usage.now, "parent, HTTP, grammars and kernel"),
            Taken(CODE, usage.files, "file pages of what runs"),
        ]
        return [part for part in parts if part.nbytes >= MIB]

    def _spare(self) -> list[Taken]:
        """What must stay free, or is mapped with the KV cache."""
        return [
            *self._mapped(),
            Taken(SLACK, self.device.slack, "for steps that take more again"),
            Taken(HEADROOM, self.settings.headroom_mib * MIB),
        ]

    def _kept(self, usage: Usage) -> int:
        """Bytes in use that the stress has taken and the allocator has kept: activations."""
        return max(0, min(self.growth, usage.now - self.resting)) if self.stressed else 0

    def _used(self) -> Usage:
        assert self.usage is not None, "measured once the weights are loaded"
        return self.usage

    def _runtime_detail(self) -> str:
        return RUNTIME_GPU if self.device.gpu else RUNTIME_CPU

    def _gpu(self) -> int | None:
        return self.rank if self.ranks > 1 and self.device.gpu else None

    def _where(self) -> str:
        return f" on {self.name}" if self.ranks > 1 else ""

    def _others(self) -> str:
        if not self.crowded:
            return f"{self.note}; " if self.note else ""
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

    def _advice(self, offers: tuple[Offer, ...]) -> str:
        return advice(offers, self.device.gpu)

    def _more_memory(self, parts: list[Taken]) -> Offer:
        """What the parts that are known need, with the smallest cache that would do."""
        tokens = max(self.settings.max_model_len or 0, SMALLEST) + PAGE_SIZE
        cache = growing((*self.owned, *self.settings.lent), tokens, 0, 0)  # the rest is in parts
        missing = sum(max(0, part.nbytes) for part in parts) + cache - self.limit
        if missing <= 0:  # what else was missing is not known
            return Offer(Knob(MEMORY_FIELD, Direction.RAISE))
        return Offer.of_memory(-(-(self.limit + missing) // MIB) * self.ranks, None)
