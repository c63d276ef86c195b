"""Reasoning before an answer, as a part of the answer's grammar: so an answer cannot end within it,
and whether a model reasons at all is left to the model. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvline_server.formats.format import Thinking
from kvline_server.formats.lark import regex

BLANKS = "\\n{0,2}"  # behind it: what templates write there, and no part of the answer


class Unmarked(Exception):
    """What ends reasoning is no token of the tokenizer."""


def thought(
    thinking: Thinking | None,
    begun: bool,
    may_begin: bool,
    ids: Mapping[str, int],
    marks: Collection[int],
) -> str:
    """Lark, empty where there is none. `begun`: the prompt ends within reasoning; `may_begin`: an
    answer to it may begin with some; `ids`: the tokenizer's added tokens by text; `marks`: those
    that are no text, of which reasoning has none. Raises Unmarked."""
    if thinking is None or not (begun or may_begin):
        return ""
    opens, closes = ids.get(thinking.open), ids.get(thinking.close)
    if closes is None and begun:
        raise Unmarked(f"{thinking.close!r}, which ends this model's reasoning, is no token")
    if closes is None or (opens is None and not begun):
        return ""
    # Token by token, as a budget may cut reasoning within a character.
    others = ",".join(str(id) for id in sorted({*marks, closes}))
    rest = f"<[^{others}]>* <[{closes}]> {regex(BLANKS)}"
    return rest if begun else f"(<[{opens}]> {rest})?"
