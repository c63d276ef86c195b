"""Compiles a grammar, to its first mask: some fail only there, and some behind it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark
from numpy.random import default_rng  # numpy would import it at its first use: in each trial

from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.source import source
from kvline_server.options.grammars import MASK_SECONDS

if TYPE_CHECKING:
    from kvline_server.grammars.vocabulary import Vocabulary

MAX_REASON = 500  # characters
EXPLORED, BEHIND_MARK = 16, 48  # tokens, and those behind a mark: a call begins with its name
MOST_EXPLORED = 256
NO_WAY_ON = "NoExtensionBias"  # all of the error where nothing may follow, and nothing has ended
UNSATISFIED = "nothing satisfies it"
NOTHING = "it allows no token of this model"
TOO_SLOW = "a mask of it takes {:.0f} ms, of {:.0f} at most: fewer alternatives may help"


class GrammarRefused(Exception):
    """With what llguidance says of it."""


def compiled(grammar: Grammar, vocabulary: Vocabulary, lexer_states: int) -> LLMatcher:
    """A matcher at its beginning, whose copies share its lexer. Raises GrammarRefused."""
    limits = LLParserLimits(max_lexer_states=lexer_states, verbose_errors=False)
    if grammar.kind == "lark":
        grammar = msgspec.structs.replace(grammar, text=_as_lark(grammar.text))
    made = LLMatcher(vocabulary.tokenizer, source(grammar), limits=limits, log_level=0)
    check(made)
    row = np.zeros(vocabulary.words, np.int32)
    fill(made, row)
    check(made)
    if not vocabulary.restrict(row):
        raise GrammarRefused(NOTHING)
    return made


def explore(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Follows a grammar for some tokens: some fail only behind the first of them, and masks that
    are slow there are slow again and again. Marks are taken first, each once, as behind them begins
    what they stand before: reasoning and other text may go on for ever. Raises GrammarRefused."""
    row, rng = np.zeros(vocabulary.words, np.int32), default_rng(0)
    own, left, marks = matcher.deep_copy(), EXPLORED, vocabulary.marks
    for _ in range(MOST_EXPLORED):
        began = time.thread_time()
        fill(own, row)
        if (took := time.thread_time() - began) > MASK_SECONDS:
            raise GrammarRefused(TOO_SLOW.format(1000 * took, 1000 * MASK_SECONDS))
        check(own)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        bits[vocabulary.tokenizer.eos_tokens] = 0
        allowed = np.flatnonzero(bits)
        if own.is_stopped() or not len(allowed) or not left:
            break
        found = marks[bits[marks] == 1]
        left = max(left, BEHIND_MARK) if len(found) else left - 1
        options = found if len(found) else allowed
        token = int(options[rng.integers(len(options))])
        marks = marks[marks != token]
        own.consume_token(token)
        check(own)


def fill(matcher: LLMatcher, row: np.ndarray) -> None:
    """Of the next token. int32 [words]"""
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def check(matcher: LLMatcher) -> None:
    """Raises GrammarRefused where it is in error."""
    if matcher.is_error():
        raise GrammarRefused(reason_of(matcher))


def reason_of(matcher: LLMatcher) -> str:
    error = matcher.get_error()
    return UNSATISFIED if NO_WAY_ON in error else shortened(error)


def shortened(text: str) -> str:
    """An error of llguidance, without the places where it says what it leaves out."""
    text = text.replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}\u2026"


def _as_lark(text: str) -> str:
    """Of Lark, or of GBNF, which vLLM takes too."""
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except Exception as error:  # it raises no class of its own
        raise GrammarRefused(f"no grammar in GBNF: {shortened(str(error))}") from None
