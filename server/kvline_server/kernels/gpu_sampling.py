"""Logprobs and sampling on a GPU: our Triton kernels (cuda_rows.py), and FlashInfer's filters."""

from __future__ import annotations

import flashinfer
import numpy as np
import torch
from flashinfer import sampling

from kvline_server.kernels import cuda_rows
from kvline_server.kernels.layout import GREEDY, NO_TOKEN, SamplingMetadata
from kvline_server.kernels.pinned import upload
from kvline_server.kernels.sampling import RowScores, Sampling, ShardScores


class GpuSampling(Sampling):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first: int
    ) -> None:
        cuda_rows.mask(logits, rows, words, first)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        values, ranks, normalisers = cuda_rows.score(logits, targets)
        ids, best = _most_likely(logits, top)
        return RowScores(values, ranks, ids, best.sub_(normalisers.unsqueeze(1)))

    def shard_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> ShardScores:
        _, ranks, normalisers = cuda_rows.score(logits, chosen)
        return ShardScores(normalisers, ranks.sub_(1), *_most_likely(logits, top))

    def best(self, logits: torch.Tensor, metadata: SamplingMetadata, first: int) -> torch.Tensor:
        temperatures, keys = self._drawn_by(metadata)
        return cuda_rows.draw(logits, keys, temperatures, first)

    def _drawn_by(self, metadata: SamplingMetadata) -> list[torch.Tensor]:
        """Temperatures, 0 of greedy rows, and keys, on the device. float32, int64 [rows]"""
        greedy = metadata.temperatures < GREEDY
        scaled = np.where(greedy, np.float32(0.0), metadata.temperatures)
        return upload(self.device, scaled, metadata.keys.view(np.int64))

    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        temperatures, keys = self._drawn_by(metadata)
        if not metadata.filtered.any():
            return cuda_rows.draw(logits, keys, temperatures)
        best = temperatures == 0.0
        weights, not_finite = self._filtered(logits, temperatures.masked_fill(best, 1.0), metadata)
        chosen = cuda_rows.draw(weights, keys).masked_fill_(not_finite, NO_TOKEN)
        if (metadata.temperatures < GREEDY).any():
            chosen = torch.where(best, cuda_rows.draw(logits, keys, temperatures), chosen)
        return chosen

    def _filtered(
        self, logits: torch.Tensor, temperatures: torch.Tensor, metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities after top-k, then top-p of the rest, then min-p, and a mask of rows whose
        logits are not finite. -> float32 [rows, vocabulary], bool [rows]"""
        weights: torch.Tensor = sampling.softmax(logits.float(), temperature=temperatures)
        # One NaN makes a whole row NaN, and the filters' searches may not end on NaN.
        not_finite = weights[:, 0].isnan()
        vocabulary = logits.shape[1]
        weights.masked_fill_(not_finite.unsqueeze(1), 1.0 / vocabulary)
        if (metadata.top_k > 0).any():
            count = np.where(metadata.top_k > 0, np.minimum(metadata.top_k, vocabulary), vocabulary)
            (top_k,) = upload(self.device, count.astype(np.int32))
            weights = sampling.top_k_renorm_probs(weights, top_k)
        if (metadata.top_p < 1.0).any():
            weights = sampling.top_p_renorm_probs(weights, upload(self.device, metadata.top_p)[0])
        if (metadata.min_p > 0.0).any():
            threshold = upload(self.device, metadata.min_p)[0] * weights.amax(dim=-1)
            weights = weights.masked_fill_(weights < threshold.unsqueeze(1), 0.0)
        return weights, not_finite


def _most_likely(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits, best first. -> int32, float32 [rows, top]"""
    rows, tokens = logits.shape
    if not top:
        none = torch.empty((rows, 0), device=logits.device)
        return none.to(torch.int32), none
    best, ids = flashinfer.top_k(logits, min(top, tokens), sorted=True)
    return ids.to(torch.int32), best.float()
