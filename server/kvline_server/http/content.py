"""What a message of another API says, as the content of a chat's."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class Content:
    """Images in their order, and a text between two of them."""

    def __init__(self, *texts: str) -> None:
        # Texts that follow each other, or an image with its place.
        self._parts: list[list[str] | tuple[Object, str]] = []
        for text in texts:
            self.text(text)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return any(isinstance(part, tuple) or any(part) for part in self._parts)

    def text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, list):
            last.append(text)
        else:
            self._parts.append([text])

    def image(self, url: str, place: str, detail: str = "auto") -> None:
        """`place`: what its client calls it."""
        self._parts.append(
            ({"type": "image_url", "image_url": {"url": url, "detail": detail}}, place)
        )

    def begin(self, text: str) -> None:
        """With this text first."""
        first = self._parts[0] if self._parts else None
        if isinstance(first, list):
            first.insert(0, text)
        else:
            self._parts.insert(0, [text])

    def extend(self, other: Content) -> None:
        for part in other._parts:
            if isinstance(part, list):
                self.text("".join(part))
            else:
                self._parts.append(part)

    def whole(self) -> tuple[str | list[Object], dict[str, str]]:
        """One text, or all parts where there are images; the place of each, by where the chat's
        message has it."""
        places = {
            f".content[{at}].image_url": part[1]
            for at, part in enumerate(self._parts)
            if isinstance(part, tuple)
        }
        parts = [
            {"type": "text", "text": "".join(part)} if isinstance(part, list) else part[0]
            for part in self._parts
        ]
        if places:
            return parts, places
        return "".join(part["text"] for part in parts), places
