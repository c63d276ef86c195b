"""Masks of tokens: of rows, as the reference, and of one request of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvline_server.engine.engine import Engine
from kvline_server.parallel.executor import Forward
from kvline_server.worker.step import (
    MASK_BITS,
    Constraints,
    InFlight,
    Step,
    TokenMasks,
    mask_words,
)


def masks(allowed: dict[int, Iterable[int]], vocabulary: int) -> TokenMasks:
    """Of the tokens that each of some sampled rows may get."""
    words = np.zeros((len(allowed), mask_words(vocabulary)), np.uint32)
    for row, tokens in enumerate(allowed.values()):
        for token in tokens:
            words[row, token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)
    rows = np.fromiter(allowed, np.int64, len(allowed))
    return TokenMasks(rows, words.view(np.int32).reshape(-1))


def forbid(logits: torch.Tensor, given: TokenMasks) -> None:
    """In place, of the whole vocabulary."""
    words = given.words.reshape(-1, mask_words(logits.shape[1]))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    for row, own in zip(given.rows.tolist(), bits, strict=True):
        logits[row, torch.from_numpy(own == 0)] = -math.inf


def mask_one(engine: Engine, id: int, tokens: Iterable[int], vocabulary: int) -> None:
    """From here on one of the engine's requests may have these tokens only."""
    executor, allowed = engine.executor, list(tokens)
    launch, forward = executor.launch, executor.forward

    def masked(step: Step, constraints: Constraints) -> Constraints:
        sequence = engine.sequences.get(id)
        if sequence is None:
            return constraints
        own = np.flatnonzero(step.sampled_requests == sequence.request_index).tolist()
        return replace(constraints, masks=masks(dict.fromkeys(own, allowed), vocabulary))

    @dataclass
    class Masked:
        step: Step
        forward: Forward

        def sample(self, constraints: Constraints) -> InFlight:
            return self.forward.sample(masked(self.step, constraints))

    def launch_masked(step: Step) -> InFlight:
        return launch(replace(step, constraints=masked(step, step.constraints)))

    def forward_masked(step: Step) -> Forward:
        return Masked(step, forward(step))

    executor.launch = launch_masked  # type: ignore[method-assign]
    executor.forward = forward_masked  # type: ignore[method-assign]
