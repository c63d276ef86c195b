"""Which tokens the sampled rows of a step may get: by the grammars that sequences follow, and where
a budget of reasoning is used up, its end alone.

A step's masks are asked for once the tokens before it are read, and come while its forward pass
runs. What goes wrong with a grammar ends the sequences that follow it, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import repeat
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvline_server.engine.batch import Rows
from kvline_server.engine.request import Sequence
from kvline_server.engine.work import NO_DRAFTS
from kvline_server.grammars import matchers
from kvline_server.grammars.matchers import Matchers
from kvline_server.grammars.messages import Wanted
from kvline_server.ipc.sampling_params import ThinkingBudget
from kvline_server.worker.step import MASK_BITS, NO_MASKS, TokenMasks, mask_words

NO_PROCESS = "this server fills no masks"
NO_TABLE: NDArray[np.int32] = np.empty((0, 0), np.int32)
EVERYTHING = np.int32(-1)


class Reasoning(NamedTuple):
    """How far it is, under a budget."""

    budget: ThinkingBudget
    begun: bool
    used: int = 0  # tokens

    @classmethod
    def under(cls, budget: ThinkingBudget) -> Reasoning:
        return cls(budget, budget.begin is None)

    def behind(self, tokens: Items[int]) -> Reasoning | None:
        """After these tokens more; None: it has ended."""
        budget, begun, used = self
        for token in tokens:
            if not begun:
                begun = token == budget.begin
            elif token == budget.end:
                return None
            else:
                used += 1
        return Reasoning(budget, begun, used)

    @property
    def must_end(self) -> bool:
        return self.begun and self.used >= self.budget.tokens


class Verdict(NamedTuple):
    """How a sequence ends with a step, whatever that step samples for it."""

    finish: Literal["stop", "error"]
    reason: str = ""


class Asked(NamedTuple):
    """The masks of a step, by sampled row."""

    rows: list[int]  # with a mask of a grammar
    owners: list[Sequence]  # of each of these
    ends: dict[int, int]  # the one token that a row may get


NOTHING = Asked([], [], {})


class Masks:
    def __init__(self, matchers: Matchers | None) -> None:
        self.failed = 0  # sequences whose grammar could not be followed
        self._matchers = matchers
        self._masked: set[int] = set()  # sequences that may have masks

    def begin(self, sequence: Sequence) -> None:
        params = sequence.params
        if not params.has_masks:
            return
        self._masked.add(sequence.id)
        if params.thinking is not None:
            sequence.reasoning = Reasoning.under(params.thinking)
        if params.grammar and self._matchers is not None:
            self._matchers.begin(sequence.id, params.grammar)

    def end(self, sequence: Sequence) -> None:
        """Whatever ends it."""
        if sequence.id in self._masked:
            self._masked.remove(sequence.id)
            if sequence.params.grammar and self._matchers is not None:
                self._matchers.end(sequence.id)

    def ask(self, rows: Rows) -> Asked:
        """For those of a step. The next step may ask once `wait` has them."""
        if not self._masked:
            return NOTHING
        asked, wanted, row = Asked([], [], {}), list[Wanted](), 0
        for sequence, drafts in zip(rows.sampled, rows.drafts or repeat(NO_DRAFTS), strict=False):
            count = 1 + len(drafts)
            if sequence.id in self._masked:
                new = sequence.tokens[sequence.masked :]
                sequence.masked = len(sequence.tokens)
                if sequence.reasoning is not None:
                    ends = _ends(sequence, sequence.reasoning, new, drafts)
                    asked.ends.update((row + at, token) for at, token in ends.items())
                if sequence.params.grammar:
                    wanted.append(Wanted(sequence.id, new, list(drafts), len(asked.rows)))
                    asked.rows.extend(range(row, row + count))
                    asked.owners.extend([sequence] * count)
            row += count
        if wanted and self._matchers is not None:
            self._matchers.ask(wanted)
        return asked

    def wait(self, asked: Asked, vocabulary: int) -> tuple[TokenMasks, dict[Sequence, Verdict]]:
        """Of a model with so many tokens. -> also which sequences end with the step"""
        if asked is NOTHING:
            return NO_MASKS, {}
        owners, table = {each.id: each for each in asked.owners}, NO_TABLE
        found = matchers.Masks(frozenset(), dict.fromkeys(owners, NO_PROCESS))
        if owners and self._matchers is not None:
            found, table = self._matchers.wait(), self._matchers.table
        rows, words = np.asarray(asked.rows, np.int64), table[: len(asked.rows)]
        if found.failed:
            kept = [at for at, each in enumerate(asked.owners) if each.id not in found.failed]
            rows, words = rows[kept], table[kept]
        masks = TokenMasks(rows, words[:, : mask_words(vocabulary)].reshape(-1))
        verdicts = {owners[id]: Verdict("stop") for id in found.finished}
        verdicts |= {owners[id]: Verdict("error", why) for id, why in found.failed.items()}
        self.failed += len(found.failed)
        return _with_ends(masks, asked.ends, vocabulary) if asked.ends else masks, verdicts


def _ends(
    sequence: Sequence, here: Reasoning | None, new: list[int], drafts: Items[int]
) -> dict[int, int]:
    """Where, of the rows of a sequence that has new tokens, its reasoning must end; and the token
    that ends it."""
    sequence.reasoning = here = here and here.behind(new)
    if here is None:
        sequence.constrained = sequence.has_penalties or bool(sequence.params.grammar)
    ends = {}
    for at in range(1 + len(drafts)):
        if here is not None and here.must_end:
            ends[at] = here.budget.end
        here = here and here.behind(drafts[at : at + 1])
    return ends


def _with_ends(masks: TokenMasks, ends: dict[int, int], vocabulary: int) -> TokenMasks:
    """Of rows that have a mask already, both hold; where nothing is left, the grammar does."""
    words = mask_words(vocabulary)
    made = dict(zip(masks.rows.tolist(), masks.words.reshape(-1, words), strict=True))
    for row, token in ends.items():
        one = np.zeros(words, np.uint32)
        one[token // MASK_BITS] = 1 << token % MASK_BITS
        both = one.view(np.int32) & made.get(row, EVERYTHING)
        made[row] = both if both.any() else made[row]
    rows = sorted(made)
    return TokenMasks(np.asarray(rows, np.int64), np.concatenate([made[row] for row in rows]))
