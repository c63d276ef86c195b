"""Logprobs and next tokens, from logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvline_server.kernels.layout import SamplingMetadata

LOGIT_BLOCK = 16  # rows of one LM-head GEMM on the CPU, fixed because results depend on it


@dataclass(frozen=True, slots=True)
class RowScores:
    """Logprobs of some rows, on the device."""

    values: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int32 [rows], 1 = most likely
    top_ids: torch.Tensor  # int32 [rows, top]
    top_values: torch.Tensor  # float32 [rows, top]

    def tensors(self) -> list[torch.Tensor]:
        return [self.values, self.ranks, self.top_ids, self.top_values]

    @classmethod
    def stack(cls, parts: list[RowScores]) -> RowScores:
        """Concatenates tables of equal `top`."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.tensors() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


@dataclass(frozen=True, slots=True)
class ShardScores:
    """Of some rows, what a rank knows from its own tokens."""

    normalisers: torch.Tensor  # float32 [rows], log of the sum of exponentials
    above: torch.Tensor  # int32 [rows], tokens more likely than the target
    top_ids: torch.Tensor  # int32 [rows, top], counted from the rank's first
    top_logits: torch.Tensor  # float32 [rows, top]


class Sampling(ABC):
    @abstractmethod
    def mask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first: int
    ) -> None:
        """Makes the logits of tokens whose bit is 0 minus infinity, in place. The first token's bit
        is the one numbered `first` of a row's first word, counted from the lowest. logits [rows,
        tokens], rows int64 [masked], words int32 [masked, words]"""

    @abstractmethod
    def shard_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> ShardScores:
        """What a rank knows of some rows' scores, from raw logits of its own tokens and `chosen`,
        each row's logit of its target, float32 [rows]. [rows, tokens]"""

    @abstractmethod
    def best(self, logits: torch.Tensor, metadata: SamplingMetadata, first: int) -> torch.Tensor:
        """`choose` without filters among a rank's own tokens, the first of which is `first`. Ranks
        compare the results (kernels/best.py). Leaves `logits` as they are. -> int64 [rows]"""

    @abstractmethod
    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        """Each row's logprob of its target, the target's rank, and the `top` best tokens, from raw
        logits of the whole vocabulary: before temperature, penalties and filters. targets int64
        [rows]"""

    @abstractmethod
    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Samples a token per row: temperature, top-k, top-p, min-p, then Gumbel-max
        (kernels/noise.py). May change `logits`. -> int64 [rows] on the device; NO_TOKEN for a row
        with a NaN or an infinite maximum, otherwise always below the vocabulary's size"""
