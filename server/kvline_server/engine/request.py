"""A sequence in the engine, and the logprobs of its tokens."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvline_server.engine.pictures import Pictures
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.caches import PageTable
from kvline_server.memory.pages import NO_EXTRAS, extend_chain, pages_for

if TYPE_CHECKING:  # penalties has the sequences of this module
    from kvline_server.engine.masks import Reasoning
    from kvline_server.engine.penalties import TokenCounts
    from kvline_server.engine.proposer import Proposer


@dataclass(slots=True)
class Scores:
    """Logprobs of consecutive positions, as arrays from the device to the client's JSON."""

    tokens: np.ndarray  # int32 [n], the token each value belongs to
    values: np.ndarray  # float32 [n]
    ranks: np.ndarray  # int32 [n], 1 = most likely
    top_ids: np.ndarray  # int32 [n, k]
    top_values: np.ndarray  # float32 [n, k]

    def rows(self, start: int, end: int) -> Scores:
        some = slice(start, end)
        columns = (self.tokens, self.values, self.ranks, self.top_ids, self.top_values)
        return Scores(*(column[some] for column in columns))


# How a sequence's tokens are drawn, as one row of a step's array.
SAMPLING_ROW = np.dtype(
    [("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("min_p", "<f4"), ("seed", "<u8")]
)
_PACK = struct.Struct("<fiffQ").pack
_MASK = 0xFFFFFFFFFFFFFFFF
MIN_TOP_P = 1e-6  # a smaller value keeps the same one token, and may be 0 as a float32


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens; the first `computed` have their keys and values in the cache."""

    id: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    pictures: Pictures | None = None  # images in its prompt
    computed: int = 0
    table: PageTable = field(default_factory=PageTable)
    chain: list[bytes] = field(default_factory=list)  # keys of its full pages
    extras: Mapping[int, bytes] = field(init=False)  # extra parts of these keys, by page
    begun: int = 0  # tokens that the prefix cache had when it was admitted last
    published: int = 0  # full pages that the prefix cache knows
    confirmed: int = 0  # computed tokens on which a result that was read as finite depends
    scored: int = 0  # prompt positions whose logprob has left the engine; survives preemption
    scores: list[Scores] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0  # tokens found in the prefix cache at first admission
    pending: int = 0  # tokens sampled on the device that the host has not read yet
    request_index: int = 0  # its index in Worker.last_tokens, while it runs
    counts: TokenCounts | None = None  # with penalties
    proposer: Proposer | None = None  # of its draft tokens, while it runs and may have some
    reasoning: Reasoning | None = None  # of a budget, until it has ended
    image_end: int = field(init=False)  # its length where its last token is an image's
    masked: int = field(init=False)  # tokens of which its masks know
    penalised_in: int = 0  # the last of the scheduler's steps that had too many penalties
    ended: bool = False  # results still in flight are discarded
    limit: int = field(init=False)  # tokens that it may have at most
    has_penalties: bool = field(init=False)  # of its params, cached because each step reads it
    # What it may get depends on its last token: it is sampled once that one is read.
    constrained: bool = field(init=False)
    sampling_row: bytes = field(init=False)  # one element of SAMPLING_ROW
    not_finite: bool = False  # a prompt position's logits were not finite
    submitted: float = field(default_factory=time.monotonic)
    waited: float | None = None  # seconds until its first rows were scheduled

    def __post_init__(self) -> None:
        p = self.params
        self.limit = self.prompt_length + p.max_tokens
        self.has_penalties, self.masked = p.has_penalties, self.prompt_length
        self.constrained = p.has_penalties or p.has_masks
        images = () if self.pictures is None else self.pictures.images
        self.image_end = images[-1].end if images else -1
        self.extras = self._extras()
        self.sampling_row = _PACK(
            p.temperature, p.top_k, max(p.top_p, MIN_TOP_P), p.min_p, p.seed & _MASK
        )

    def _extras(self) -> Mapping[int, bytes]:
        salt = self.params.cache_salt.encode()
        found = {} if self.pictures is None else self.pictures.extras()
        if salt:  # behind its length, so that it is never read as an image
            found[0] = len(salt).to_bytes(8, "big") + salt + found.get(0, b"")
        return found or NO_EXTRAS

    def extend_chain(self, upto: int) -> None:
        """Appends the keys of pages that are full within its first `upto` tokens."""
        extend_chain(self.chain, self.tokens, upto, self.extras)

    @property
    def length(self) -> int:
        """Tokens it has, read by the host or not. An upper bound: what is not read yet may be fewer
        tokens. At its limit a sequence waits until they are read, and ends only then."""
        return len(self.tokens) + self.pending

    @property
    def uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.length - self.computed

    @property
    def penalised(self) -> int:
        """Pages of the tokens whose logits its penalties change, at most."""
        if not self.has_penalties:
            return 0
        of_prompt = self.params.repetition_penalty != 1.0
        return pages_for(self.length - (0 if of_prompt else self.prompt_length))

    @property
    def first_scored(self) -> int:
        """First prompt position that still needs its logprob; prompt_length when none does."""
        if self.params.prompt_logprobs is None:
            return self.prompt_length
        # Position 0 has nothing before it and never has a logprob.
        return max(1, self.scored)

    @property
    def cacheable(self) -> int:
        """Tokens that may come from the prefix cache, those of its answer too once it has been
        preempted: the last one must be computed, and so must the token before each position of the
        prompt whose logprob is returned."""
        every_scored = self.first_scored == self.prompt_length
        return (len(self.tokens) if every_scored else self.first_scored) - 1
