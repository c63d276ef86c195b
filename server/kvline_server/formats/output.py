"""The events of an answer, and which blanks around its parts belong to none of them.

Templates write newlines around reasoning and before calls; those are no content. Text itself
stays as the model wrote it.
"""

from __future__ import annotations

from kvline_server.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
    added,
)

BLANKS = " \t\r\n"


class Trailing:
    """Holds back blanks at the end of what came, until it is known whether anything follows."""

    def __init__(self, blanks: str) -> None:
        self._blanks = blanks
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that something is known to follow, or that is more than blanks."""
        kept = text.rstrip(self._blanks)
        if not kept:
            self._held.append(text)
            return ""
        out = "".join(self._held) + kept
        self._held = [text[len(kept) :]]
        return out

    @property
    def waits(self) -> bool:
        return any(self._held)

    def drop(self) -> None:
        self._held = []

    def flush(self) -> str:
        out = "".join(self._held)
        self._held = []
        return out


class Output:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self.calls = 0  # so far
        self._content, self._reasoning = Trailing(BLANKS), Trailing("\n")
        self._after_reasoning = False  # its newlines are still skipped
        self._reasons = False  # some of the reasoning has come
        self.omits_content = False

    def content(self, text: str) -> None:
        if self.omits_content:
            return
        if self._after_reasoning:
            text = text.lstrip("\n")
            self._after_reasoning = not text
        if text:
            self._add(Text(self._content.push(text)))

    def reasoning(self, text: str) -> None:
        if not self._reasons:
            text = text.lstrip("\n")
            self._reasons = bool(text)
        if text:
            self._add(Reasoning(self._reasoning.push(text)))

    def goes_on(self, reasons: bool) -> bool:
        """Whether more content, or more reasoning, goes out as it comes."""
        if reasons:
            return self._reasons and not self._reasoning.waits
        omitted = self.omits_content or self._after_reasoning
        return not omitted and not self._content.waits

    def begin_reasoning(self) -> None:
        self._content.drop()
        self._reasons = False

    def end_reasoning(self) -> None:
        self._reasoning.drop()
        self._after_reasoning = True

    def start(self, name: str) -> None:
        self._content.drop()
        self._reasoning.drop()
        self._after_reasoning = False
        self._events.append(CallStart(self.calls, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        self._add(CallArguments(self.calls - 1, text))

    def end_call(self, complete: bool) -> None:
        self._events.append(CallEnd(self.calls - 1, complete))

    def drop_blanks(self) -> None:
        """Those since the last call are its format's."""
        self._content.drop()

    def flush(self) -> None:
        """Nothing follows."""
        self._add(Reasoning(self._reasoning.flush()))
        if not self.calls:
            self._add(Text(self._content.flush()))

    def _add(self, event: Text | Reasoning | CallArguments) -> None:
        if event.text:
            self._events = added(self._events, event)

    def take(self) -> list[Event]:
        out, self._events = self._events, []
        return out
