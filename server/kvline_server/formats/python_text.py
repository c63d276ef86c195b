"""Python's literals as JSON text, converted as they come."""

from __future__ import annotations

import re

from kvline_server.formats.json_text import BLANKS, MAX_DEPTH, quoted

MAX_NUMBER = 4096  # characters
_WORD = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"([-+]?)(\d+(?:_\d+)*)?(\.\d*)?([eE][-+]?\d+)?")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_SIMPLE = {each: f"\\{each}" for each in 'ntrbf\\"'} | {
    "'": "'",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}
_DIGITS = {"x": 2, "u": 4, "U": 8}  # of an escape by number


class PythonValue:
    """Follows one literal: strings, numbers, True, None, lists and dicts, JSON's words too."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.out: list[str] = []  # JSON text that was not taken yet
        self._open: list[str] = []
        self._expects = "value"
        self._comma = False  # before the next value, if one comes: a last comma may stand alone
        self._quote = ""
        self._is_key = False
        self._escape = ""
        self._high = ""  # the first half of a pair of escapes
        self._word: list[str] = []

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str, at: int = 0) -> int:
        """-> the first position that is not taken"""
        while at < len(text) and not self.done and not self.broken:
            if self._quote:
                at = self._string(text, at)
            elif found := _WORD.match(text, at):
                self._word.append(found[0])
                self.broken = sum(map(len, self._word)) > MAX_NUMBER
                at = found.end()
            elif self._word:
                self.end()
            elif text[at] in BLANKS:
                at += 1
            else:
                at = self._structure(text[at], at)
        return at

    def end(self) -> None:
        """A word or a number is whole, as something else follows, or nothing."""
        if not self._word:
            return
        word = "".join(self._word)
        self._word = []
        value = _WORDS.get(word) or _number(word)
        if value is None or self._expects not in ("value", "item"):
            self.broken = True
            return
        self._begin()
        self.out.append(value)
        self._ended()

    def _structure(self, character: str, at: int) -> int:
        expects, inside = self._expects, self._open[-1] if self._open else ""
        if character in "'\"" and expects in ("value", "item", "key"):
            self._begin()
            self._quote, self._is_key = character, expects == "key"
            self.out.append('"')
        elif character in "[{" and expects in ("value", "item") and len(self._open) < MAX_DEPTH:
            self._begin()
            self._open.append(character)
            self._expects = "item" if character == "[" else "key"
            self.out.append(character)
        elif character in "]}" and inside and inside + character in ("[]", "{}"):
            if expects not in ("item", "key", "next"):
                self.broken = True
                return at
            self._open.pop()
            self._comma = False
            self.out.append(character)
            self._ended()
        elif character == ":" and expects == "colon":
            self._expects = "value"
            self.out.append(": ")
        elif character == "," and expects == "next":
            self._comma = True
            self._expects = "item" if inside == "[" else "key"
        else:
            self.broken = True
            return at
        return at + 1

    def _begin(self) -> None:
        if self._comma:
            self.out.append(", ")
        self._comma = False

    def _ended(self) -> None:
        self._expects = "next"
        self.done = not self._open

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._rest_of_escape(text[at], at)
        if text[at] == "\\":
            self._escape = "\\"
        elif text[at] == self._quote:
            self._emit('"')
            self._quote = ""
            if self._is_key:
                self._expects = "colon"
            else:
                self._ended()
        else:
            plain = _PLAIN[self._quote].match(text, at)
            assert plain is not None
            self._emit(quoted(plain[0]))
            return plain.end()
        return at + 1

    def _rest_of_escape(self, character: str, at: int) -> int:
        self._escape += character
        kind, digits = self._escape[1], self._escape[2:]
        if kind in _DIGITS:
            if len(self._escape) > 2 and character not in "0123456789abcdefABCDEF":
                self.broken = True
                return at
            if len(digits) == _DIGITS[kind]:
                self._by_number(kind, digits)
        else:
            # As Python has it: a backslash that begins no escape stands for itself.
            self._emit(_SIMPLE.get(kind, "\\\\" + quoted(kind)))
            self._escape = ""
        return at + 1

    def _by_number(self, kind: str, digits: str) -> None:
        self._escape = ""
        number = int(digits, 16)
        if kind == "U" and (number > 0x10FFFF or 0xD800 <= number < 0xE000):
            self.broken = True
        elif 0xD800 <= number < 0xDC00:
            self._emit("")
            self._high = f"\\u{digits}"
        else:
            self._emit(quoted(chr(number)) if kind == "U" else f"\\u{digits:0>4}")

    def _emit(self, text: str) -> None:
        self.out.append(self._high + text)
        self._high = ""

    def take(self) -> str:
        text = "".join(self.out)
        self.out = []
        return text


def _number(word: str) -> str | None:
    """A number of Python's as one of JSON's."""
    found = _NUMBER.fullmatch(word)
    if found is None:
        return None
    sign, whole, fraction, exponent = found.groups(default="")
    if not whole and len(fraction) < 2:
        return None
    if len(whole) > 1 and whole[0] == "0":
        return None
    whole = whole.replace("_", "") or "0"
    fraction = f"{fraction}0" if fraction == "." else fraction
    return f"{sign.replace('+', '')}{whole}{fraction}{exponent}"
