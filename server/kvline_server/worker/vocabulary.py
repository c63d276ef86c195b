"""Logprobs and next tokens of a chunk of rows, from logits of which each rank has its own tokens.

No rank ever has a row of all logits but where filters need one: then each rank gets some of the
rows whole (docs/decisions/033). Every rank has the same results. Rows are edited here first.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from kvline_server.kernels.best import token_of
from kvline_server.kernels.group import TABLE_BYTES
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import SamplingMetadata
from kvline_server.kernels.sampling import RowScores, ShardScores
from kvline_server.model.shard import Shard, share, tokens
from kvline_server.worker.step import MASK_BITS, NO_MASKS, LogitsEdits, TokenMasks


class Vocabulary:
    def __init__(self, kernels: Kernels, size: int) -> None:
        """Of `size` tokens."""
        self.kernels, self.group = kernels, kernels.group
        self.size = size
        self.own = tokens(size, Shard(self.group.rank, self.group.ranks))
        self.width = share(size, self.group.ranks)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        """Sampling.score. logits [rows, own tokens], targets int64 [rows]"""
        if self.group.ranks == 1:
            return self.kernels.sampling.score(logits, targets, top)
        chosen = self._chosen(logits, targets)
        top = min(top, self.size)
        every = self.group.all_gather(
            self._table(self.kernels.sampling.shard_scores(logits, chosen, top), top)
        )
        normalisers, above = every[:, :, 0].view(torch.float32), every[:, :, 1]
        normaliser = normalisers.logsumexp(dim=0)
        ids, values = every[:, :, 2:].transpose(0, 1).chunk(2, dim=2)  # [rows, ranks, some]
        # Stable: of equal values the lowest token comes first, as ranks do.
        values = values.flatten(1).view(torch.float32)
        best = values.sort(dim=1, descending=True, stable=True)
        return RowScores(
            values=chosen - normaliser,
            ranks=above.sum(dim=0, dtype=torch.int32) + 1,
            top_ids=ids.flatten(1).gather(1, best.indices[:, :top]),
            top_values=best.values[:, :top] - normaliser.unsqueeze(1),
        )

    def _chosen(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The targets' logits, each from the rank that has it. -> float32 [rows]"""
        at = (targets - self.own.start).clamp_(0, len(self.own) - 1)
        every = self.group.all_gather(logits.gather(1, at.unsqueeze(1)).squeeze(1).float())
        return every.gather(0, (targets // self.width).unsqueeze(0)).squeeze(0)

    def _table(self, part: ShardScores, top: int) -> torch.Tensor:
        """What other ranks need to know, of one shape on all. -> int32 [rows, 2 + 2 * some]"""
        missing = min(top, self.width) - part.top_ids.shape[1]
        ids, logits = part.top_ids + self.own.start, part.top_logits
        if missing:
            ids, logits = pad(ids, (0, missing)), pad(logits, (0, missing), value=float("-inf"))
        columns = (part.normalisers.unsqueeze(1), part.above.unsqueeze(1), ids, logits)
        return torch.cat([column.view(torch.int32) for column in columns], dim=1)

    def sample(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        edits: tuple[LogitsEdits, ...] = (),
        masks: TokenMasks = NO_MASKS,
    ) -> torch.Tensor:
        """The next token of each row: edits of its logits, its mask, then sampling. May change
        `logits`. [rows, own tokens] -> int64 [rows]"""
        if any(len(each.rows) for each in edits):
            logits = logits.float()  # of bfloat16 a penalty of 0.05 changes nothing at 20
        for each in edits:
            apply(self.kernels, logits, each.within(self.own))
        if len(masks.rows):
            rows, words = self.kernels.upload(masks.rows, masks.within(self.own))
            words = words.view(len(rows), -1)  # on a GPU they come in one dimension
            self.kernels.sampling.mask(logits, rows, words, self.own.start % MASK_BITS)
        if self.group.ranks == 1:
            return self.kernels.sampling.choose(logits, metadata)
        filtered = np.flatnonzero(metadata.filtered)
        if len(filtered) == len(logits):
            return self._filtered(logits, metadata, filtered)
        best = self.group.all_gather(self.kernels.sampling.best(logits, metadata, self.own.start))
        chosen = token_of(best.amax(dim=0))
        if len(filtered):
            (at,) = self.kernels.upload(filtered)
            chosen[at] = self._filtered(logits, metadata, filtered)
        return chosen

    def _filtered(
        self, logits: torch.Tensor, metadata: SamplingMetadata, rows: np.ndarray
    ) -> torch.Tensor:
        """Filters need whole rows: each rank gets and samples some of them. -> int64 [len(rows)]"""
        ranks, row_bytes = self.group.ranks, self.width * logits.itemsize
        step = max(1, TABLE_BYTES // (ranks * row_bytes)) * ranks
        blocks = (rows[start : start + step] for start in range(0, len(rows), step))
        return torch.cat([self._block(logits, metadata, block) for block in blocks])

    def _block(
        self, logits: torch.Tensor, metadata: SamplingMetadata, rows: np.ndarray
    ) -> torch.Tensor:
        ranks, each = self.group.ranks, -(-len(rows) // self.group.ranks)
        # The last row again and again, so that every rank has as many.
        padded = rows[np.minimum(np.arange(ranks * each), len(rows) - 1)]
        (at,) = self.kernels.upload(padded)
        missing = self.width - len(self.own)
        sent = logits[at]
        if missing:
            sent = pad(sent, (0, missing), value=float("-inf"))
        parts = self.group.all_to_all(sent.view(ranks, each, self.width))
        whole = parts.transpose(0, 1).reshape(each, ranks * self.width)[:, : self.size]
        own = padded[self.group.rank * each :][:each]
        chosen = self.kernels.sampling.choose(whole, metadata.at(own))
        return self.group.all_gather(chosen).flatten()[: len(rows)]


def apply(kernels: Kernels, logits: torch.Tensor, edits: LogitsEdits) -> None:
    """In place. logits float32 [rows, tokens]"""
    if not len(edits.rows):
        return
    flat, count = logits.view(-1), logits.shape[1]
    pairs = edits.rows * count + edits.tokens
    at, factors, subtracted = kernels.upload(pairs, edits.factors, edits.subtracted)
    values = flat[at]
    values = torch.where(values > 0, values / factors, values * factors) - subtracted
    flat[at] = values
