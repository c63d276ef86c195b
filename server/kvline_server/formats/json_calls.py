"""Calls written as JSON: an object with a name and arguments, several of them, or a list; and those
whose name stands before their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from kvline_server.formats.json_text import BLANKS, Json, is_text
from kvline_server.formats.output import Output
from kvline_server.formats.reader import MAX_NAME, Arguments, ListReader, QuotedArguments, Reader

ARGUMENTS = frozenset({"arguments", "parameters"})
# Where no trained mark says that this is a call, it has no other keys beside its own.
BESIDE = frozenset({"type", "id"})
INNER = ("[ARGS]", "[CALL_ID]")  # marks between a name and its arguments
_LABEL = re.compile(r"[^\s\[{]+")


class JsonCalls(ListReader):
    closing = "}"

    def __init__(self, out: Output, trained: bool) -> None:
        super().__init__(out)
        self._trained = trained
        self._clear()

    def _clear(self) -> None:
        self._name: str | None = None
        self._arguments: Arguments | None = None
        self._scan: Json | None = None
        self._caught: list[str] = []
        self._then: Callable[[str], bool] = self._key

    @property
    def in_value(self) -> bool:
        if self._state == self._through:
            return self._arguments is not None and self._arguments.in_string
        return self._scan is not None and self._scan.in_string

    @property
    def special(self) -> re.Pattern[str] | None:
        arguments = self._arguments
        return arguments.special if arguments and self._state == self._through else None

    def _opens(self, text: str, at: int) -> bool:
        if text[at] != "{":
            return False
        self._clear()
        self._state = self._brace
        return True

    def _brace(self, text: str, at: int) -> int:
        self._state = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._next(text, at)

    def _next(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        return self._catch(self._key, at) if text[at] == '"' else self._fail(at)

    def _catch(self, then: Callable[[str], bool], at: int) -> int:
        """A string follows, which `then` gets; it says whether the string fits."""
        self._scan, self._caught, self._then = Json(), [], then
        self._state = self._string
        return at

    def _string(self, text: str, at: int) -> int:
        assert self._scan is not None
        end = self._scan.feed(text, at)
        self._caught.append(text[at:end])
        if self._scan.broken or sum(map(len, self._caught)) > MAX_NAME:
            return self._fail(end)
        if self._scan.done:
            value = json.loads("".join(self._caught))
            if not is_text(value) or not self._then(value):
                return self._fail(end)
            if self._arguments is not None and self._arguments.shown:
                self.settled = end
        return end

    def _key(self, key: str) -> bool:
        self._state, self._value = self._colon, self._other
        if key == "name":
            self._value = self._first_of_name
            return self._name is None
        if key in ARGUMENTS:
            self._value = self._first_of_arguments
            return self._arguments is None
        return self._trained or key in BESIDE

    def _named(self, name: str) -> bool:
        if not name:
            return False
        self._name = name
        self._state = self._behind_value
        if self._arguments is not None and self._arguments.done:
            self._show()
            self._end_call(True)
        return True

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
        elif text[at] not in BLANKS:
            return self._fail(at)
        return at + 1

    def _first_of_name(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        return self._catch(self._named, at) if text[at] == '"' else self._fail(at)

    def _first_of_arguments(self, text: str, at: int) -> int:
        character = text[at]
        if character in BLANKS:
            return at + 1
        if character == "{":
            self._arguments = Arguments(self.out)
        elif character == '"':
            self._arguments = QuotedArguments(self.out)
        elif character == "n":  # null: there are none
            self._value = self._other
            return self._other(text, at)
        else:
            return self._fail(at)
        self._state = self._through
        return at

    def _through(self, text: str, at: int) -> int:
        """The arguments themselves."""
        arguments = self._arguments
        assert arguments is not None
        end = arguments.feed(text, at)
        if arguments.begun and self._name is not None and not arguments.shown:
            self._show()
        if arguments.shown:
            self.settled = end
        if arguments.broken:
            self.spills = arguments.shown
            return self._fail(end)
        if arguments.done:
            if arguments.shown:
                self._end_call(True)
            self._state = self._behind_value
        return end

    def _show(self) -> None:
        assert self._name is not None and self._arguments is not None
        self._begin_call(self._name)
        self._arguments.show()

    def _other(self, text: str, at: int) -> int:
        """A value that is none of a call's."""
        self._scan = Json()
        self._state = self._skip
        return at

    def _skip(self, text: str, at: int) -> int:
        assert self._scan is not None
        end = self._scan.feed(text, at)
        if self._scan.broken:
            return self._fail(end)
        if self._scan.done:
            self._state = self._behind_value
        return end

    def _close(self, at: int) -> int:
        if self._arguments is None:  # a tool without parameters, called without any
            if self._name is None or not self._trained:
                return self._fail(at)
            self._begin_call(self._name)
            self.out.arguments("{}")
            self._end_call(True)
        elif not self._arguments.shown:
            return self._fail(at)
        return self._closed(at)


class NamedCall(Reader):
    """`f[ARGS]{…}`, also `f[CALL_ID]x[ARGS]{…}` and `f{…}`."""

    def __init__(self, out: Output) -> None:
        super().__init__(out)
        self._name = ""
        self._seen = ""  # of a mark that the tokenizer has as text
        self._arguments = Arguments(out)

    @property
    def in_value(self) -> bool:
        return self._arguments.in_string

    @property
    def special(self) -> re.Pattern[str] | None:
        return self._arguments.special

    def take(self, mark: str) -> bool:
        """A mark between the name and the arguments."""
        fits = bool(self._name) and self._state != self._through
        if fits and mark in INNER:
            self._state = self._brace if mark == "[ARGS]" else self._identifier
            return True
        return False

    def _start(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        self._state = self._label
        return at if _LABEL.match(text, at) else self._fail(at)

    def _label(self, text: str, at: int) -> int:
        if found := _LABEL.match(text, at):
            self._name += found[0]
            return found.end() if len(self._name) <= MAX_NAME else self._fail(found.end())
        self._state = self._behind_name
        return at

    def _behind_name(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        self._state = self._mark if text[at] == "[" else self._brace
        return at

    def _mark(self, text: str, at: int) -> int:
        seen = self._seen + text[at]
        if seen in INNER:
            self._seen = ""
            self.take(seen)
        elif any(mark.startswith(seen) for mark in INNER):
            self._seen = seen
        else:
            return self._fail(at, unread=len(self._seen))
        return at + 1

    def _identifier(self, text: str, at: int) -> int:
        """The model's own id for the call, which nobody reads."""
        if text[at] == "[":
            self._state = self._mark
            return at
        return at + 1 if text[at].isalnum() or text[at] in BLANKS else self._fail(at)

    def _brace(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        self._state = self._through
        return at if text[at] == "{" else self._fail(at)

    def _through(self, text: str, at: int) -> int:
        arguments = self._arguments
        end = arguments.feed(text, at)
        if arguments.begun and not arguments.shown:
            self._begin_call(self._name)
            arguments.show()
        if arguments.shown:
            self.settled = end
        if arguments.broken:
            self.spills = arguments.shown
        elif arguments.done:
            self._end_call(True)
        self.over = arguments.broken or arguments.done
        return end
