"""One step's inputs: the work list as flat arrays, and which rows see the LM head.

Rows of hidden states are laid out decodes first, then prompt chunks. The LM head sees the scored
rows, then the sampled ones, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Work
from kvline_server.kernels.torch import GATHER_TOKENS, DecodeGroup, PrefillPart
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for

MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Consecutive prompt positions of one sequence whose logprobs this step computes."""

    sequence: Sequence
    first: int  # prompt position of the first target
    count: int


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens], where keys and values are written
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPart, ...]
    rows: torch.Tensor  # int64 [scored + sampled], rows of hidden states for the LM head
    targets: np.ndarray  # int64 [scored], the token each scored row is judged by
    scored: tuple[ScoredRun, ...]
    sampled: tuple[Sequence, ...]  # one per sampled row, in order


def build(work: list[Work]) -> Batch:
    """The arrays of one step, from work whose sequences already hold their pages."""
    ordered = [w for w in work if w.count == 1] + [w for w in work if w.count > 1]
    single = sum(1 for w in ordered if w.count == 1)
    token_ids, positions, slots = _flatten(ordered)
    rows, targets, scored, sampled = _select_rows(ordered)
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        decodes=tuple(_decode_groups(ordered[:single])),
        prefills=tuple(_prefill_parts(ordered[single:], single)),
        rows=torch.from_numpy(rows),
        targets=targets,
        scored=tuple(scored),
        sampled=tuple(sampled),
    )


def _flatten(work: list[Work]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    total = sum(w.count for w in work)
    token_ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    at = 0
    for w in work:
        end, stop = at + w.count, w.start + w.count
        token_ids[at:end] = w.sequence.tokens[w.start : stop]
        span = np.arange(w.start, stop)
        positions[at:end] = span
        pages = np.asarray(w.sequence.pages, dtype=np.int64)
        slots[at:end] = pages[span // PAGE_SIZE] * PAGE_SIZE + span % PAGE_SIZE
        at = end
    return token_ids, positions, slots


def _select_rows(
    work: list[Work],
) -> tuple[np.ndarray, np.ndarray, list[ScoredRun], list[Sequence]]:
    scored_rows: list[np.ndarray] = []
    targets: list[int] = []
    scored: list[ScoredRun] = []
    sampled_rows: list[int] = []
    sampled: list[Sequence] = []
    at = 0
    for w in work:
        # The row of position p judges the token at p + 1.
        first = max(w.start + 1, w.sequence.first_scored)
        last = min(w.start + w.count, w.sequence.prompt_length - 1)
        if first <= last:
            scored_rows.append(np.arange(at + first - 1 - w.start, at + last - w.start))
            targets += w.sequence.tokens[first : last + 1]
            scored.append(ScoredRun(w.sequence, first, last - first + 1))
        if w.samples:
            sampled_rows.append(at + w.count - 1)
            sampled.append(w.sequence)
        at += w.count
    rows = np.concatenate([*scored_rows, np.asarray(sampled_rows, dtype=np.int64)])
    return rows.astype(np.int64), np.asarray(targets, dtype=np.int64), scored, sampled


def _decode_groups(work: list[Work]) -> list[DecodeGroup]:
    """Neighbours share a gather while padding to the longest stays within the workspace."""
    groups: list[DecodeGroup] = []
    start = 0
    while start < len(work):
        end, widest = start, 0
        while end < len(work):
            width = max(widest, pages_for(work[end].start + 1))
            if end > start and width * (end + 1 - start) * PAGE_SIZE > GATHER_TOKENS:
                break
            end, widest = end + 1, width
        groups.append(_decode_group(work[start:end], start, widest))
        start = end
    return groups


def _decode_group(work: list[Work], at: int, width: int) -> DecodeGroup:
    pages = np.full((len(work), width), DUMMY_PAGE, dtype=np.int64)
    lengths = np.asarray([w.start + 1 for w in work])
    for row, w in enumerate(work):
        count = pages_for(w.start + 1)
        pages[row, :count] = w.sequence.pages[:count]
    hidden = np.arange(width * PAGE_SIZE)[None, :] >= lengths[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), MASKED)
    return DecodeGroup(
        start=at,
        end=at + len(work),
        pages=torch.from_numpy(pages.reshape(-1)),
        mask=mask.view(len(work), 1, 1, -1),
    )


def _prefill_parts(work: list[Work], at: int) -> list[PrefillPart]:
    parts = []
    for w in work:
        length = w.start + w.count
        mask = None
        if w.start:
            future = torch.ones(w.count, length, dtype=torch.bool).triu_(w.start + 1)
            mask = torch.zeros(w.count, length).masked_fill_(future, MASKED)
        pages = np.asarray(w.sequence.pages[: pages_for(length)], dtype=np.int64)
        parts.append(PrefillPart(at, at + w.count, length, torch.from_numpy(pages), mask))
        at += w.count
    return parts
