"""What a message of another API says, as the content of a chat's."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class Content:
    """Images in their order, and a text between two of them."""

    def __init__(self, *texts: str) -> None:
        self._parts: list[str | tuple[Object, str]] = []  # an image has its place
        for text in texts:
            self.text(text)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return any(self._parts)

    def text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, str):
            self._parts[-1] = last + text
        else:
            self._parts.append(text)

    def image(self, url: str, place: str, detail: str = "auto") -> None:
        """`place`: what its client calls it."""
        self._parts.append(
            ({"type": "image_url", "image_url": {"url": url, "detail": detail}}, place)
        )

    def begin(self, text: str) -> None:
        """With this text first."""
        first = self._parts[0] if self._parts else None
        self._parts[:1] = [text + first] if isinstance(first, str) else [text, *self._parts[:1]]

    def extend(self, other: Content) -> None:
        for part in other._parts:
            if isinstance(part, str):
                self.text(part)
            else:
                self._parts.append(part)

    def whole(self) -> tuple[str | list[Object], dict[str, str]]:
        """One text, or all parts where there are images; the place of each, by where the chat's
        message has it."""
        places = {
            f".content[{at}].image_url": part[1]
            for at, part in enumerate(self._parts)
            if not isinstance(part, str)
        }
        if not places:
            return "".join(part for part in self._parts if isinstance(part, str)), places
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else part[0]
            for part in self._parts
        ]
        return parts, places
