"""Memory of a device by part. Its owner names a part, so that a new one changes no reader."""

from __future__ import annotations

import dataclasses
import re

from kvline_contract.codec import ContractError, document, field

WEIGHTS, ACTIVATIONS, GRAPHS = "weights", "activations", "graphs"
KV_CACHE, HEADROOM, OTHERS = "kv-cache", "headroom", "others"
WINDOWS = "windows"  # the KV cache of layers with a sliding window, whatever the budget
STATES = "states"  # recurrent states of running sequences, whatever their length
SNAPSHOTS = "snapshots"  # recurrent states kept for prefixes
EXPERTS = "experts"  # weights of a mixture of experts but for its router
SCALES = "scales"  # of weights in fp8, and of experts in 4 bits
TOWER = "tower"  # weights of an encoder of images
ENCODER_WORK = "encoder-work"  # what the encoder's largest images take, kept free for it
ENCODER_CACHE = "encoder-cache"  # rows of images that were encoded, whatever the budget
COLLECTIVES = "collectives"  # what the exchange between ranks takes
RUNTIME = "runtime"  # of the engine's process: Python, torch, tables and buffers
PROCESSES = "other-processes"  # on a CPU the container's others, on a GPU all that ran before
CODE = "code"  # file pages of programs that run
CLIENTS = "clients"  # what requests may make HTTP processes hold
GRAMMARS = "grammars"  # what those that answers follow may take
SLACK = "slack"  # for what the same steps may take more when they are repeated
LOADED = (WEIGHTS, SCALES, EXPERTS, TOWER)  # of a model's tensors
IMAGES = (TOWER, ENCODER_WORK, ENCODER_CACHE)  # a service of text alone has none of these
FIGURES = (WEIGHTS, ACTIVATIONS, GRAPHS, KV_CACHE, HEADROOM, OTHERS)  # of MemoryV1, in its order
MAX_PARTS = 24  # of a report of version 3
# Of earlier ones and of what no request names a version for. The API server refuses a longer list,
# and earlier operators and servers do not read the document that has one.
STORED_PARTS = 16
LOWEST = -(2**31)
_NAME = re.compile(r"[a-z][-a-z0-9]{0,31}")


@document
class Part:
    name: str = field(limit=32)  # lower case, with hyphens
    mib: int = field(low=LOWEST)
    detail: str | None = field(limit=64, omit_none=True, default=None)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ContractError(f"name: expected such as {KV_CACHE}, got {self.name[:32]!r}")
        # The rest is negative when the parts, measured at different moments, overlap.
        if self.mib < 0 and self.name != OTHERS:
            raise ContractError(f"mib: {self.name} has {self.mib} MiB; only {OTHERS} may have < 0")


@document
class Memory:
    """Use of one rank's device in MiB. The parts add up exactly to the total."""

    total_mib: int = field("totalMiB")
    parts: tuple[Part, ...] = field(items=MAX_PARTS)
    # The index of its GPU in the pod; absent on a CPU, and from servers of one rank.
    gpu: int | None = field(high=255, omit_none=True, default=None)

    def __post_init__(self) -> None:
        if len({part.name for part in self.parts}) != len(self.parts):
            raise ContractError("parts: two have one name")
        if sum(part.mib for part in self.parts) != self.total_mib:
            raise ContractError("the MiB of the parts do not add up to totalMiB")

    def mib(self, name: str) -> int:
        """MiB of a part, 0 where there is none of this name."""
        return sum(part.mib for part in self.parts if part.name == name)

    def encoder(self) -> dict[str, int]:
        """MiB of an encoder of images by part, empty for text alone. As what is stored has them:
        there the smallest parts of many are summed up."""
        kept = self.stored()
        return {name: mib for name in IMAGES if (mib := kept.mib(name))}

    @property
    def has_encoder(self) -> bool:
        """Of images; a part of less than 1 MiB is there too."""
        return any(part.name in IMAGES for part in self.parts)

    def stored(self) -> Memory:
        """With STORED_PARTS at most: the smallest that version 1 has no figure for are others."""
        if len(self.parts) <= STORED_PARTS:
            return self
        others = next((part for part in self.parts if part.name == OTHERS), Part(OTHERS, 0))
        named = [part for part in self.parts if part is not others]
        spare = sorted((p for p in named if p.name not in FIGURES), key=lambda part: part.mib)
        few = spare[: len(named) + 1 - STORED_PARTS]
        detail = others.detail or "with " + ", ".join(part.name for part in few)
        rest = Part(OTHERS, others.mib + sum(part.mib for part in few), detail[:64])
        return dataclasses.replace(self, parts=(*(p for p in named if p not in few), rest))


def rank_name(rank: int, ranks: int, gpu: bool) -> str:
    """How texts name a rank where there are several: by its GPU, or on a CPU by its number."""
    name = f"rank {rank} of {ranks}"
    return f"GPU {rank} ({name})" if gpu else name


def rank_title(rank: int, ranks: int, gpu: bool, binding: bool) -> str:
    """The heading of a rank's memory; the binding rank limits the budget of all."""
    return rank_name(rank, ranks, gpu) + ": the least memory left" * binding


@document
class MemoryV1:
    """A Memory as version 1 has it: of fixed parts, unknown ones counted as others. Documents that
    have no request to name a version keep it; they have the parts too where these say more."""

    total_mib: int = field("totalMiB")
    weights_mib: int = field("weightsMiB")
    activations_mib: int = field("activationsMiB")
    graphs_mib: int = field("graphsMiB")
    kv_mib: int = field("kvMiB")
    headroom_mib: int = field("headroomMiB")
    others_mib: int = field("othersMiB", low=LOWEST)
    parts: tuple[Part, ...] | None = field(items=STORED_PARTS, omit_none=True, default=None)

    def __post_init__(self) -> None:
        if sum(self._figures()) != self.total_mib:
            raise ContractError("the MiB parts do not add up to totalMiB")
        self.upgraded()  # parts are checked as those of version 2

    @classmethod
    def of(cls, memory: Memory) -> MemoryV1:
        total, known = memory.total_mib, [memory.mib(name) for name in FIGURES[:-1]]
        weights, activations, graphs, kv, headroom = known
        rest = total - sum(known)
        fixed = cls(total, weights, activations, graphs, kv, headroom, rest)
        parts = memory.stored().parts
        return fixed if fixed.upgraded().parts == parts else dataclasses.replace(fixed, parts=parts)

    def upgraded(self) -> Memory:
        fixed = zip(FIGURES, self._figures(), strict=True)
        parts = tuple(Part(name, mib) for name, mib in fixed) if self.parts is None else self.parts
        return Memory(self.total_mib, parts)

    def _figures(self) -> tuple[int, ...]:
        return (
            self.weights_mib,
            self.activations_mib,
            self.graphs_mib,
            self.kv_mib,
            self.headroom_mib,
            self.others_mib,
        )
