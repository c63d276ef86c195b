"""JSON text as it comes: where a value ends, where it breaks, and what may be shown of it.

Nothing is parsed twice: a character is read once, whatever came before it.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 256  # of lists and objects in each other
BLANKS = " \t\n\r"
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SPECIAL = re.compile(r'["\\\x00-\x1f]')  # in a string: all else stands for itself
_LONE = re.compile("[\ud800-\udfff]")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"{": "}", "[": "]"}
_WORDS = {"t": "true", "f": "false", "n": "null"}
# A number: from what it is so far, by the class of the next character; "d" is a digit but 0.
_NUMBER: dict[str, dict[str, str]] = {
    "": {"-": "-", "0": "0", "d": "i"},
    "-": {"0": "0", "d": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "d": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "d": "f"},
    "f": {"0": "f", "d": "f", "e": "e"},
    "e": {"+": "s", "-": "s", "0": "x", "d": "x"},
    "s": {"0": "x", "d": "x"},
    "x": {"0": "x", "d": "x"},
}
_WHOLE_NUMBERS = frozenset("0ifx")


class Json:
    """Follows one JSON value through text that comes in parts."""

    def __init__(self) -> None:
        self.done = False  # the value is whole
        self.broken = False  # the next character cannot follow
        self.begun = False  # a value in the outermost list or object has begun, or all is done
        self.in_string = False
        self._is_key = False
        self._open: list[str] = []
        self._expects = "value"
        self._escape = ""  # the part of an escape that has come
        self._high = False  # the last escape is the first half of a pair
        self._word = ""  # what is still to come of true, false or null
        self._number: str | None = None

    @property
    def partial(self) -> int:
        """How many of the last characters are a part of an escape, or of a pair of them."""
        return len(self._escape) + (6 if self._high else 0)

    @property
    def passes(self) -> bool:
        """Whether text without SPECIAL changes nothing, and may be shown as it comes."""
        return self.in_string and not self.broken and not self.partial

    @property
    def is_nested(self) -> bool:
        """Within a list or an object."""
        return bool(self._open)

    def feed(self, text: str, at: int = 0) -> int:
        """-> the first position that is not taken: the end of `text`, or where the value is done
        or broken"""
        while at < len(text) and not self.done and not self.broken:
            if self.in_string:
                at = self._string(text, at)
            elif self._word:
                at = self._rest_of_word(text, at)
            elif self._number is not None:
                at = self._digit(text, at)
            elif text[at] in BLANKS:
                found = _BLANK.match(text, at)
                at = found.end() if found else at
            else:
                at = self._structure(text[at], at)
        return at

    def end(self) -> None:
        """Nothing follows: a number without anything around it is whole."""
        if self._number in _WHOLE_NUMBERS and not self._open:
            self._ended()

    def _structure(self, character: str, at: int) -> int:
        expects, inside = self._expects, self._open[-1] if self._open else ""
        if expects in ("value", "item") and character != "]":
            return self._value(character, at)
        if character == '"' and expects in ("key", "first key"):
            self.in_string = self._is_key = True
        elif inside and character == _CLOSES[inside] and expects in ("first key", "item", "next"):
            self._close()
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == "," and expects == "next":
            self._expects = "key" if inside == "{" else "value"
        else:
            self.broken = True
            return at
        return at + 1

    def _value(self, character: str, at: int) -> int:
        if character == '"':
            self.in_string, self._is_key = True, False
        elif character in "{[" and len(self._open) < MAX_DEPTH:
            self.begun = self.begun or bool(self._open)
            self._open.append(character)
            self._expects = "first key" if character == "{" else "item"
            return at + 1
        elif character in _WORDS:
            self._word = _WORDS[character][1:]
        elif character in "-0123456789":
            self._number = _NUMBER[""]["d" if character in "123456789" else character]
        else:
            self.broken = True
            return at
        self.begun = self.begun or bool(self._open)
        return at + 1

    def _close(self) -> None:
        self._open.pop()
        self._ended()

    def _ended(self) -> None:
        self._number, self._expects = None, "next"
        self.done = not self._open
        self.begun = self.begun or self.done

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._rest_of_escape(text[at], at)
        plain = _PLAIN.match(text, at)
        end = plain.end() if plain else at
        if end > at:
            self._high = False
        elif text[at] == "\\":
            self._escape = "\\"
            return at + 1
        elif text[at] == '"':
            self._high = self.in_string = False
            if self._is_key:
                self._expects = "colon"
            else:
                self._ended()
            return at + 1
        else:
            self.broken = True
        return end

    def _rest_of_escape(self, character: str, at: int) -> int:
        so_far = self._escape
        fits = character in '"\\/bfnrtu' if so_far == "\\" else character in _HEX
        if not fits:
            self.broken = True
            return at
        so_far += character
        whole = len(so_far) == 6 or (len(so_far) == 2 and character != "u")
        if whole:
            first = len(so_far) == 6 and so_far[2] in "dD" and so_far[3] in "89abAB"
            self._escape, self._high = "", first
        else:
            self._escape = so_far
        return at + 1

    def _rest_of_word(self, text: str, at: int) -> int:
        if text[at] != self._word[0]:
            self.broken = True
            return at
        self._word = self._word[1:]
        if not self._word:
            self._ended()
        return at + 1

    def _digit(self, text: str, at: int) -> int:
        assert self._number is not None
        kind = "d" if text[at] in "123456789" else {"E": "e", "d": ""}.get(text[at], text[at])
        following = _NUMBER[self._number].get(kind)
        if following is not None:
            self._number = following
            return at + 1
        if self._number in _WHOLE_NUMBERS:
            self._ended()
        else:
            self.broken = True
        return at


def unquoted(inner: str) -> str:
    """What a part of a JSON string stands for, where that is JSON text again: half a pair stays
    an escape, as no text has one."""
    value = json.loads(f'"{inner}"')
    return _LONE.sub(lambda half: f"\\u{ord(half[0]):04x}", value)


def quoted(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text(value: object) -> bool:
    """Whether it can be sent: half a pair cannot."""
    return isinstance(value, str) and _LONE.search(value) is None
