"""One step as plain arrays, and its results: all that passes between the engine and a device.

Nothing here refers to a sequence or a tensor, so a step can be sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvline_server.kernels.layout import Layout, SamplingMetadata
from kvline_server.kernels.routing import Played


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Changes to the logits of sampled rows, in the order of their rows; no (row, token) twice.
    A positive logit is divided by its factor, another one multiplied, then the rest subtracted."""

    rows: NDArray[np.int64]  # [edits], of the sampled rows
    tokens: NDArray[np.int64]  # [edits]
    factors: NDArray[np.float32]  # [edits]
    subtracted: NDArray[np.float32]  # [edits]

    def within(self, own: range) -> LogitsEdits:
        """Those of some tokens, which are counted from the first of them."""
        mine = (self.tokens >= own.start) & (self.tokens < own.stop)
        if mine.all() and not own.start:
            return self
        tokens = self.tokens[mine] - own.start
        return LogitsEdits(self.rows[mine], tokens, self.factors[mine], self.subtracted[mine])

    def between(self, first: int, last: int) -> LogitsEdits:
        """Those of rows first..last, which become rows 0..last - first."""
        a, b = np.searchsorted(self.rows, (first, last))
        return LogitsEdits(
            self.rows[a:b] - first, self.tokens[a:b], self.factors[a:b], self.subtracted[a:b]
        )


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some of the sampled rows may get, a bit each: token t is bit t % 32 of word
    t // 32. Every row allows one token or more; all rows have as many words."""

    rows: NDArray[np.int64]  # [masked], of the sampled rows, in their order
    words: NDArray[np.int32]  # [masked * words of a row]

    def between(self, first: int, last: int) -> TokenMasks:
        """Those of rows first..last, which become rows 0..last - first."""
        a, b = np.searchsorted(self.rows, (first, last))
        return TokenMasks(self.rows[a:b] - first, self._table()[a:b].reshape(-1))

    def within(self, own: range) -> NDArray[np.int32]:
        """The words that have some tokens, which may begin and end within a word.
        -> [masked, words]"""
        columns = slice(own.start // MASK_BITS, -(-own.stop // MASK_BITS))
        return np.ascontiguousarray(self._table()[:, columns])

    def _table(self) -> NDArray[np.int32]:
        masked = len(self.rows)
        return self.words.reshape(masked, len(self.words) // masked if masked else 0)


MASK_BITS = 32  # tokens of a word
NO_MASKS = TokenMasks(np.empty(0, np.int64), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Constraints:
    """What changes the logits of sampled rows: the edits, one after the other, then the masks. They
    may depend on tokens that the step before samples."""

    logits_edits: tuple[LogitsEdits, ...] = ()
    masks: TokenMasks = NO_MASKS

    def between(self, first: int, last: int) -> Constraints:
        """Those of rows first..last, which become rows 0..last - first."""
        edits = tuple(each.between(first, last) for each in self.logits_edits)
        return Constraints(edits, self.masks.between(first, last))


NO_CONSTRAINTS = Constraints()


def mask_words(vocabulary: int) -> int:
    """Of a row."""
    return -(-vocabulary // MASK_BITS)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Behind the last norm of a model with a draft head: those that its worker keeps between steps,
    in places of which the first has zeros."""

    before: NDArray[np.int64]  # [sequences], the place of the state before each one's first row
    rows: NDArray[np.int64]  # [kept], rows of the step whose states are kept
    places: NDArray[np.int64]  # [kept], where each is


@dataclass(frozen=True, slots=True)
class Step:
    """Rows are ordered decodes first, then prompt chunks. The LM head gets the scored rows, then
    the sampled ones, and no others."""

    # [rows]; 0 where the host has not read the token yet. Those of images count on behind the
    # vocabulary: rows of the encoder's cache (worker/encoder.py).
    tokens: NDArray[np.int64]
    layout: Layout
    pending_rows: NDArray[np.int64]  # [pending], rows whose token the host has not read yet
    pending_requests: NDArray[np.int64]  # [pending], request index of each
    logits_indices: NDArray[np.int64]  # [scored + sampled], rows whose hidden states are needed
    targets: NDArray[np.int64]  # [scored], the prompt token that each scored row predicts
    scored_top: int  # alternatives of each scored row
    sampled_requests: NDArray[np.int64]  # [sampled], request index of each: a place in last_tokens
    sampling_metadata: SamplingMetadata  # of the sampled rows
    listed: NDArray[np.int64]  # [listed], sampled rows whose token's logprob is returned
    listed_top: int  # alternatives of each of them
    constraints: Constraints = NO_CONSTRAINTS  # of the sampled rows
    routing: Played = Played.NOTHING
    hidden: HiddenStates | None = None  # of a model with a draft head


@dataclass(frozen=True, slots=True)
class Drafting:
    """Draft tokens behind the last token of each of some sequences, all of whose others are
    computed. One gets as many as there are layouts that have it."""

    tokens: NDArray[np.int64]  # [sequences], the last of each
    before: NDArray[np.int64]  # [sequences], the place of the hidden state before it
    # Of each pass a row of a sequence: of its last token, then of each draft. Passes have fewer
    # sequences than those before, the first of them.
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """kernels.sampling.RowScores, copied to the host."""

    values: NDArray[np.float32]  # [rows]
    ranks: NDArray[np.int32]  # [rows]
    top_ids: NDArray[np.int32]  # [rows, top]
    top_values: NDArray[np.float32]  # [rows, top]


@dataclass(frozen=True, slots=True)
class Results:
    tokens: NDArray[np.int64]  # [sampled]; NO_TOKEN where the logits were not finite
    scored: Table | None  # None without scored rows
    listed: Table | None  # None without listed rows


class InFlight(Protocol):
    """A launched step whose results have not been read yet."""

    def wait(self) -> Results:
        """Raises DeviceOutOfMemory or DeviceFailure: errors of a device surface here."""
